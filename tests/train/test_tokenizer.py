import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from train.tokenizer import CharTokenizer, FileTokenizer, TokenizerConfig, build_tokenizer, decode_sampled, stop_ids

CHAR = TokenizerConfig(kind="char", path="", alphabet="")


@pytest.fixture(scope="module")
def word_file(tmp_path_factory):
    """A tokenizer.json that pads, truncates and adds a <bos> unless told not to."""
    vocabulary = {"<unk>": 0, "<bos>": 1, "<eos>": 2, "one": 3, "two": 4, "three": 9}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    built.add_special_tokens(["<bos>", "<eos>"])
    built.post_processor = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    built.enable_padding(length=8, pad_token="<unk>")
    built.enable_truncation(max_length=2)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    built.save(str(path))
    return path


def test_characters_come_after_pad_and_eos_in_the_order_of_the_alphabet():
    tokenizer = CharTokenizer("ba")
    assert tokenizer.vocab_size == 4
    assert tokenizer.encode("abba").tolist() == [3, 2, 2, 3]
    assert tokenizer.encode("abba").dtype == np.int32
    assert tokenizer.encode("").shape == (0,)
    assert tokenizer.decode([3, 2, 1, 0]) == "ab<eos><pad>"
    assert (tokenizer.token_id("<pad>"), tokenizer.token_id("<eos>"), tokenizer.token_id("a")) == (0, 1, 3)


def test_an_empty_alphabet_is_that_of_all_texts_sorted():
    tokenizer = build_tokenizer(CHAR, ["12+3=", "51"])
    assert tokenizer.decode(range(2, tokenizer.vocab_size)) == "+1235="


def test_a_given_alphabet_is_taken_as_it_is():
    tokenizer = build_tokenizer(TokenizerConfig(kind="char", path="", alphabet="zyx"), ["never read"])
    assert tokenizer.encode("xyz").tolist() == [4, 3, 2]


@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=30))
def test_decoding_an_encoded_text_gives_it_back(text):
    tokenizer = CharTokenizer("".join(sorted(set(text))) or "a")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_character_outside_the_alphabet_is_named_with_its_remedy():
    with pytest.raises(ValueError, match=r"got 'é' \(U\+00E9 LATIN SMALL LETTER E WITH ACUTE\) in 'né'; add it to"):
        CharTokenizer("n").encode("né")


def test_special_tokens_in_a_text_are_only_characters():
    tokenizer = CharTokenizer("<eos>")
    assert tokenizer.token_id("<eos>") not in tokenizer.encode("<eos>")


@pytest.mark.parametrize(("alphabet", "message"), [("", "at least one character"), ("aba", "got 'a' more than once")])
def test_an_alphabet_is_not_empty_and_names_a_character_once(alphabet, message):
    with pytest.raises(ValueError, match=message):
        CharTokenizer(alphabet)


@pytest.mark.parametrize("token", [4, -1])
def test_an_id_outside_the_vocabulary_is_refused(token, word_file):
    with pytest.raises(ValueError, match=f"expected 0 to 3, got {token}"):
        CharTokenizer("ab").decode([0, token])
    with pytest.raises(ValueError, match="expected 0 to 9"):
        FileTokenizer(word_file).decode([10])


def test_a_file_is_used_without_adding_padding_or_cutting(word_file):
    tokenizer = build_tokenizer(TokenizerConfig(kind="file", path=str(word_file), alphabet=""), [])
    assert tokenizer.encode("one two three one").tolist() == [3, 4, 9, 3]
    assert tokenizer.encode("<bos> one").tolist() == [1, 3]
    assert tokenizer.decode([1, 3, 2]) == "<bos> one <eos>"


def test_the_vocabulary_of_a_file_reaches_to_its_largest_id(word_file):
    assert FileTokenizer(word_file).vocab_size == 10


def test_stop_tokens_are_found_by_their_string(word_file):
    assert stop_ids(FileTokenizer(word_file), ["<eos>", "two"]) == (2, 4)
    with pytest.raises(ValueError, match=r"got '<eso>'; did you mean '<eos>'"):
        stop_ids(FileTokenizer(word_file), ["<eso>"])
    with pytest.raises(ValueError, match=r"got 'Ω'; no token is like it"):
        stop_ids(CharTokenizer("ab"), ["Ω"])


def test_digests_follow_the_vocabulary(word_file, tmp_path):
    assert CharTokenizer("ab").digest() == CharTokenizer("ab").digest()
    assert len({CharTokenizer("ab").digest(), CharTokenizer("ba").digest(), FileTokenizer(word_file).digest()}) == 3
    changed = json.loads(word_file.read_text())
    changed["model"]["vocab"]["two"] = 5
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps(changed))
    assert FileTokenizer(other).digest() != FileTokenizer(word_file).digest()


def test_a_file_that_is_missing_or_no_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"expected a readable file, got: No such file .*gone\.json"):
        FileTokenizer(tmp_path / "gone.json")
    for content in (b"{}", b"\xff"):
        path = tmp_path / "bad.json"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"expected a tokenizer\.json, got: .*bad\.json"):
            FileTokenizer(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "file", "path": "", "alphabet": ""}, "expected the path of a tokenizer.json"),
        ({"kind": "file", "path": "x", "alphabet": "ab"}, 'tokenizer.alphabet: expected ""'),
        ({"kind": "char", "path": "x", "alphabet": ""}, 'set tokenizer.kind = "file"'),
    ],
)
def test_settings_of_the_other_kind_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TokenizerConfig(**settings)


def test_ids_of_a_vocabulary_padded_beyond_the_tokenizers_have_no_text():
    tokenizer = CharTokenizer("ab")
    assert decode_sampled(tokenizer, np.array([2, 3], np.int32)) == "ab"
    assert decode_sampled(tokenizer, np.array([7, 2, 3, 4, 5, 1], np.int32)) == "\ufffdab\ufffd\ufffd<eos>"
    assert decode_sampled(tokenizer, np.array([], np.int32)) == ""
