"""What is told of a model that is no directory here."""

import pytest

from ebbtide.types.spec_file import no_directory


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "org/a.b_c-1"])
def test_a_name_of_the_hub_gets_the_command_that_fetches_it(model: str) -> None:
    folder = f"models/{model.split('/')[1]}"
    assert no_directory(model).endswith(f"hf download {model} --local-dir {folder}, then give {folder}")


@pytest.mark.parametrize("model", ["/nope", "nope", "./a/b", "../a", "a/b/c", "a/", "a/b c", ""])
def test_any_other_path_is_a_path(model: str) -> None:
    assert no_directory(model) == f"{model!r} is no directory; give the path of a local checkpoint"
