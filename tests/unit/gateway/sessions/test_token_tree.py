"""A path's ids are there once, and found again by any that begin like them."""

import random

import pytest

from ebbtide.gateway.sessions.token_tree import PathKey, TokenPrefix, TokenTree


def forked() -> TokenTree:
    """1: prompt 1 2 3, completions 4 5 and 4 6. 2: behind 1 2 3 4 5, 7, then 8. 3: behind 1 2, 9, then none."""
    tree = TokenTree()
    tree.add_turn(1, TokenPrefix(None, 0), [1, 2, 3], completions=2)
    tree.set_sampled(PathKey(1, 0), [4, 5])
    tree.set_sampled(PathKey(1, 1), [4, 6])
    tree.add_turn(2, TokenPrefix(PathKey(1, 0), 5), [7], completions=1)
    tree.set_sampled(PathKey(2), [8])
    tree.add_turn(3, TokenPrefix(PathKey(2), 2), [9], completions=1)
    return tree


def test_paths_are_what_their_turns_repeat_and_add() -> None:
    tree = forked()
    assert [tree.path(key).tolist() for key in tree.paths()] == [
        [1, 2, 3, 4, 5],
        [1, 2, 3, 4, 6],
        [1, 2, 3, 4, 5, 7, 8],
        [1, 2, 9],
    ]
    assert [tree.prompt(number).tolist() for number in (1, 2, 3)] == [[1, 2, 3], [1, 2, 3, 4, 5, 7], [1, 2, 9]]
    assert list(tree.chain(TokenPrefix(PathKey(2), 7))) == [(PathKey(2), 7), (PathKey(1), 5)]
    assert list(tree.chain(TokenPrefix(PathKey(3), 3))) == [(PathKey(3), 3), (PathKey(1), 2)]


@pytest.mark.parametrize(
    ("ids", "key", "length"),
    [
        ([1, 2, 3, 4, 5, 7, 8, 9], PathKey(2), 7),
        ([1, 2, 3, 4, 5, 9], PathKey(1), 5),
        ([1, 2, 3, 4, 6, 7], PathKey(1, 1), 5),
        ([1, 2, 3, 4], PathKey(1), 4),
        ([1, 2, 9, 9], PathKey(3), 3),
        ([1, 2], PathKey(1), 2),
        ([2], None, 0),
        ([], None, 0),
    ],
)
def test_the_longest_path_that_ids_begin_with_is_found(ids: list[int], key: PathKey | None, length: int) -> None:
    assert forked().longest_prefix(ids) == (key, length)


def test_a_turn_cannot_repeat_what_is_not_there() -> None:
    tree = forked()
    with pytest.raises(ValueError, match="turn 4 repeats 8 ids"):
        tree.add_turn(4, TokenPrefix(PathKey(2), 8), [], completions=1)
    with pytest.raises(ValueError, match="later"):
        tree.add_turn(2, TokenPrefix(PathKey(3), 1), [], completions=1)


def test_any_tree_finds_what_comparing_all_paths_finds() -> None:
    draw = random.Random(4)
    for _ in range(40):
        tree = TokenTree()
        for number in range(1, 12):
            ids = [draw.randint(0, 1) for _ in range(draw.randint(0, 12))]
            paths = [tree.path(key).tolist() for key in tree.paths()]
            found = tree.longest_prefix(ids)
            assert found.length == max((_common(path, ids) for path in paths), default=0)
            tree.add_turn(number, found, ids[found.length :], completions=draw.randint(1, 2))
            assert tree.prompt(number).tolist() == ids
            for key in tree.completions(number):
                tree.set_sampled(key, [draw.randint(0, 1) for _ in range(draw.randint(0, 4))])


def _common(left: list[int], right: list[int]) -> int:
    same = [one == other for one, other in zip(left, right, strict=False)]
    return same.index(False) if False in same else len(same)
