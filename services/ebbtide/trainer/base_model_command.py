"""Keeps the former path of `python -m ebbtide.trainer.base_model`."""

from ebbtide.former_paths import warn_moved
from ebbtide.trainer.base_model.__main__ import main

warn_moved("ebbtide.trainer.base_model_command", "ebbtide.trainer.base_model")

if __name__ == "__main__":
    main()
