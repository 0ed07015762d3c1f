"""Text that comes in pieces is the text of the whole."""

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ebbtide.gateway.decode import Detokenizer, PieceDecoders, WindowDetokenizer
from tests.fakes.model_texts import (
    CORPUS,
    END,
    START,
    byte_level_tokenizer,
    fallback_tokenizer,
    random_text,
    tokenizers,
)

KINDS = ("byte-level", "fallback", "characters")


def streamed(detokenizer: Detokenizer, ids: list[int], draw: random.Random) -> str:
    text, at = "", 0
    while at < len(ids):
        step = draw.randint(1, 4)
        text += detokenizer.push(ids[at : at + step])
        at += step
    return text + detokenizer.end()


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_any_split_are_the_text_of_the_whole(kind: str, skip: bool) -> None:
    fast, draw = tokenizers()[kind].backend_tokenizer, random.Random(7)
    made = PieceDecoders(fast)
    for _ in range(150):
        ids = fast.encode(random_text(draw, draw.randint(0, 30)), add_special_tokens=False).ids
        whole = fast.decode(ids, skip_special_tokens=skip)
        assert streamed(Detokenizer(made.decoder([], skip_special=skip)), ids, draw) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_make_no_sense_have_the_text_that_the_tokenizer_gives_them(kind: str) -> None:
    fast, draw = tokenizers()[kind].backend_tokenizer, random.Random(8)
    made, count = PieceDecoders(fast), fast.get_vocab_size()
    for _ in range(150):
        ids = [draw.randrange(count + 5) for _ in range(draw.randint(0, 30))]
        if kind == "fallback":  # many bytes, for invalid runs among them
            ids = [fast.token_to_id(f"<0x{draw.randrange(256):02X}>") if draw.random() < 0.5 else one for one in ids]
        whole = fast.decode(ids, skip_special_tokens=False)
        assert streamed(Detokenizer(made.decoder([], skip_special=False)), ids, draw) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_is_what_the_whole_adds_to_the_prompt(kind: str) -> None:
    fast, draw = tokenizers()[kind].backend_tokenizer, random.Random(9)
    made = PieceDecoders(fast)
    for _ in range(100):
        prompt = fast.encode("Hello " + random_text(draw, 5), add_special_tokens=False).ids
        ids = fast.encode(random_text(draw, 10), add_special_tokens=False).ids
        before, whole = (
            fast.decode(prompt, skip_special_tokens=False),
            fast.decode([*prompt, *ids], skip_special_tokens=False),
        )
        assert before + streamed(Detokenizer(made.decoder(prompt, skip_special=False)), ids, draw) == whole


def test_no_piece_ends_within_a_character() -> None:
    fast = byte_level_tokenizer().backend_tokenizer
    detokenizer = Detokenizer(PieceDecoders(fast).decoder([], skip_special=False))
    pieces = [detokenizer.push([one]) for one in fast.encode("a🎉b").ids]
    assert "".join(pieces) == "a🎉b"
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_that_the_prompt_began_is_completed_by_the_response() -> None:
    fast = byte_level_tokenizer().backend_tokenizer
    ids = fast.encode("🎉").ids
    assert len(ids) > 1
    assert streamed(
        Detokenizer(PieceDecoders(fast).decoder(ids[:1], skip_special=False)), ids[1:], random.Random(1)
    ) == ("🎉")


def test_the_end_token_has_no_text_at_the_end_alone() -> None:
    fast = byte_level_tokenizer().backend_tokenizer
    end, start = fast.token_to_id(END), fast.token_to_id(START)
    detokenizer = Detokenizer(PieceDecoders(fast).decoder([], skip_special=False), hidden_ends=[end])
    assert detokenizer.push([start, end]) == START
    assert detokenizer.push([end, start]) == END + END + START
    assert detokenizer.push([end]) + detokenizer.end() == ""


def test_special_tokens_are_skipped_if_asked() -> None:
    fast = fallback_tokenizer().backend_tokenizer
    ids = [*fast.encode("a", add_special_tokens=False).ids, fast.token_to_id(END)]
    made = PieceDecoders(fast)
    assert streamed(Detokenizer(made.decoder([], skip_special=True)), ids, random.Random(1)) == "a"
    assert streamed(Detokenizer(made.decoder([], skip_special=False)), ids, random.Random(1)) == "a" + END


def other_tokenizers() -> dict[str, Any]:
    """Byte-level under a decoder that nothing here knows; and words, which one decoder joins by spaces."""
    bytes_, pieces = (
        Tokenizer.from_str(byte_level_tokenizer().backend_tokenizer.to_str()),
        Tokenizer(models.WordPiece()),
    )
    bytes_.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("\x00", 0, 0)])
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    pieces.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, show_progress=False))
    return {"bytes": bytes_, "pieces": pieces}


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_other_decoders_are_followed_by_a_window(kind: str) -> None:
    fast, draw = other_tokenizers()[kind], random.Random(10)
    made = PieceDecoders(fast)
    assert isinstance(made.decoder([], skip_special=False), WindowDetokenizer)
    for text in [*CORPUS, *CORPUS]:
        ids = fast.encode(text).ids
        assert streamed(Detokenizer(made.decoder([], skip_special=False)), ids, draw) == fast.decode(ids)
