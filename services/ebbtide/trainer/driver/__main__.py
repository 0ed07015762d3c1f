"""Keeps the former path of `python -m ebbtide.driver`."""

from ebbtide.driver.__main__ import main
from ebbtide.former_paths import warn_moved

warn_moved("ebbtide.trainer.driver", "ebbtide.driver")

if __name__ == "__main__":
    main()
