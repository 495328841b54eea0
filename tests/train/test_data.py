import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from train.chat import ChatTemplate
from train.data import DataConfig, Encoding, PromptConfig, PromptData, read_examples, read_jsonl, read_supervised, split
from train.tasks import Example, generate
from train.tokenizer import CharTokenizer

ADDITION = DataConfig(task="addition", path="", holdout=512)
PLAIN = PromptConfig(template="{prompt}", stop=("<eos>",))


def numbered(count):
    return [Example(prompt=f"p{i}", answer=str(i), where=f"f:{i}") for i in range(count)]


def encoding(examples, *, template="{prompt}", max_new_tokens=4, row_length=48):
    prompt = PromptConfig(template=template, stop=("<eos>",))
    texts = [prompt.render(example.prompt) + example.answer for example in examples]
    tokenizer = CharTokenizer("".join(sorted(set().union(*texts))))
    return Encoding(tokenizer=tokenizer, prompt=prompt, max_new_tokens=max_new_tokens, row_length=row_length)


def prompts(examples, seed=0):
    return PromptData(examples, [], encoding(examples), seed)


def test_addition_holds_every_pair_once_with_the_digits_of_the_sum_reversed():
    examples = generate("addition")
    answers = {example.prompt: example.answer for example in examples}
    assert len(examples) == len(answers) == 10_000
    assert (answers["12+34="], answers["7+85="], answers["5+5="], answers["99+99="]) == ("64", "29", "01", "891")
    assert (answers["0+0="], answers["0+10="]) == ("0", "01")


def test_the_quickstart_fits_its_own_sizes():
    examples = read_examples(ADDITION)
    train, held_out = split(ADDITION, examples, seed=0)
    data = PromptData(train, held_out, encoding(examples), seed=0)
    assert (len(data), len(data.held_out)) == (9488, 512)
    first = data[0]
    tokenizer = encoding(examples).tokenizer
    assert tokenizer.decode(first.tokens) == first.text
    assert tokenizer.decode(first.answer_tokens) == first.answer + "<eos>"
    assert first.tokens.dtype == first.answer_tokens.dtype == np.int32


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(100, 300))
def test_every_epoch_is_another_order_of_all_prompts(seed, count):
    data = prompts(numbered(count), seed)
    epochs = [[data[e * count + i].text for i in range(count)] for e in range(3)]
    assert all(sorted(epoch) == sorted(f"p{i}" for i in range(count)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_ticket_is_the_same_prompt_however_it_is_reached():
    order = [prompts(numbered(150), 3)[ticket].text for ticket in range(400)]
    again = prompts(numbered(150), 3)
    assert [again[ticket].text for ticket in reversed(range(400))] == order[::-1]


def test_neighbouring_seeds_do_not_share_epochs():
    # Epoch e of run seed s must not be epoch 0 of run seed s + e, as it would be with grain's own seeds.
    first, second = prompts(numbered(200), 0), prompts(numbered(200), 1)
    assert [first[200 + i].text for i in range(200)] != [second[i].text for i in range(200)]


def test_a_negative_ticket_is_refused():
    with pytest.raises(ValueError, match="ticket: expected 0 or more, got -1"):
        prompts(numbered(100))[-1]


def test_the_split_is_the_same_for_the_same_seed_and_disjoint():
    examples = generate("addition")
    train, held_out = split(ADDITION, examples, seed=4)
    assert split(ADDITION, examples, seed=4) == (train, held_out)
    assert split(ADDITION, examples, seed=5)[1] != held_out
    assert len(held_out) == 512
    assert len(train) + len(held_out) == 10_000
    assert not {e.prompt for e in train} & {e.prompt for e in held_out}


def test_copies_of_a_held_out_prompt_are_not_trained_on():
    config = DataConfig(task="addition", path="f", holdout=5)
    examples = numbered(60) * 3
    train, held_out = split(config, examples, seed=0)
    assert len(held_out) == 5
    assert len(train) == 3 * 55
    assert not {e.prompt for e in train} & {e.prompt for e in held_out}


def test_of_a_file_at_most_a_tenth_is_held_out():
    config = DataConfig(task="addition", path="f", holdout=512)
    train, held_out = split(config, numbered(500), seed=0)
    assert (len(train), len(held_out)) == (450, 50)


def test_a_file_too_short_to_hold_anything_out_says_what_to_set():
    with pytest.raises(
        ValueError, match=r"at least 10 distinct prompts .* got 9 .*data\.holdout=0 and eval\.prompts=0"
    ):
        split(DataConfig(task="addition", path="f", holdout=512), numbered(9), seed=0)
    assert len(split(DataConfig(task="addition", path="f", holdout=0), numbered(9), seed=0)[0]) == 9


def test_holding_out_everything_is_refused():
    with pytest.raises(ValueError, match="expected fewer than the 10000 prompts of the data, got 10000"):
        split(DataConfig(task="addition", path="", holdout=10_000), generate("addition"), seed=0)


def test_the_template_surrounds_the_prompt_and_no_other_brace_is_touched():
    prompt = PromptConfig(template="Q {x}: {prompt} A:", stop=("<eos>",))
    assert prompt.render("1{prompt}") == "Q {x}: 1{prompt} A:"
    examples = numbered(3)
    data = PromptData(examples, [], encoding(examples, template="Q {prompt}?"), seed=0)
    tokenizer = encoding(examples, template="Q {prompt}?").tokenizer
    assert tokenizer.decode(data.train[1].tokens) == "Q p1?"
    assert data.train[1].text == "p1"


@pytest.mark.parametrize("template", ["", "prompt", "{prompt}{prompt}", "{Prompt}"])
def test_a_template_holds_the_prompt_once(template):
    with pytest.raises(ValueError, match=r"prompt\.template: expected \{prompt\} exactly once"):
        PromptConfig(template=template, stop=("<eos>",))


@pytest.mark.parametrize("stop", [(), ("<eos>", "<eos>")])
def test_stop_tokens_are_distinct_and_there_is_one(stop):
    with pytest.raises(ValueError, match=r"prompt\.stop: expected at least one"):
        PromptConfig(template="{prompt}", stop=stop)


def test_a_prompt_fits_its_row_exactly_or_is_named_with_its_line():
    fits = [Example(prompt="a" * 44, answer="b", where="f.jsonl:7")]
    assert len(PromptData(fits, [], encoding(fits), 0).train[0].tokens) == 44
    long = [Example(prompt="a" * 45, answer="b", where="f.jsonl:7")]
    with pytest.raises(
        ValueError, match=r"^f\.jsonl:7: expected a prompt of 1 to 44 .*got 45; .*row_length to at least 49"
    ):
        PromptData(long, [], encoding(long), 0)


def test_an_answer_and_its_stop_token_fit_or_the_line_is_named():
    fits = [Example(prompt="a", answer="bcd", where="f:1")]
    assert len(PromptData(fits, [], encoding(fits), 0).train[0].answer_tokens) == 4
    long = [Example(prompt="a", answer="bcde", where="f.jsonl:2")]
    with pytest.raises(
        ValueError, match=r"^f\.jsonl:2: expected an answer of at most 3 tokens .*max_new_tokens to at least 5"
    ):
        PromptData([], long, encoding(long), 0)


def test_a_character_outside_the_alphabet_names_the_line():
    bad = [Example(prompt="ax", answer="a", where="f.jsonl:9")]
    only_a = Encoding(tokenizer=CharTokenizer("a"), prompt=PLAIN, max_new_tokens=4, row_length=48)
    with pytest.raises(ValueError, match=r"^f\.jsonl:9: tokenizer: expected characters .*got 'x'"):
        PromptData(bad, [], only_a, 0)


def test_the_digest_follows_prompts_answers_order_and_split():
    base = numbered(30)
    tokenized = encoding(base)
    changed = [Example(prompt="p0", answer="1", where="f:0"), *base[1:]]
    variants = [
        PromptData(base, [], tokenized, 0),
        PromptData(changed, [], tokenized, 0),
        PromptData(base[::-1], [], tokenized, 0),
        PromptData(base[:20], base[20:], tokenized, 0),
    ]
    assert len({data.digest() for data in variants}) == 4
    assert PromptData(base, [], tokenized, 0).digest() == variants[0].digest()


def write(tmp_path, content):
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    return path


def test_a_file_is_read_with_integers_crlf_blank_lines_a_bom_and_other_keys(tmp_path):
    path = write(
        tmp_path,
        b'\xef\xbb\xbf{"prompt": "1+1=", "answer": 2}\r\n\n{"answer": "\xc3\xa9 ", "prompt": " p", "source": [1]}\r\n',
    )
    assert read_jsonl(path) == [
        Example(prompt="1+1=", answer="2", where=f"{path}:1"),
        Example(prompt=" p", answer="é ", where=f"{path}:3"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"}', "expected the key 'answer', got 'prompt'"),
        (b'{"answer": "a"}', "expected the key 'prompt', got 'answer'"),
        (b'{"prompt": "a", "answer": null}', "expected 'answer' to be a string, got null"),
        (b'{"prompt": "a", "answer": ["b"]}', "expected 'answer' to be a string, got a list"),
        (b'{"prompt": "a", "answer": 1.5}', "expected 'answer' to be a string, got a number; write it in quotes"),
        (b'{"prompt": "a", "answer": true}', "expected 'answer' to be a string, got a boolean"),
        (b'{"prompt": 1, "answer": "b"}', "expected 'prompt' to be a string, got a number"),
        (b'{"prompt": "", "answer": "b"}', "expected 'prompt' to be a string that is not empty"),
        (b'{"prompt": "a", "answer": ""}', "expected 'answer' to be a string that is not empty"),
        (b'{"prompt": "a", ', "expected one JSON object, got: .* column"),
        (b'{"prompt": "a", "answer": ' + b"1" * 5000 + b"}", "expected one JSON object, got: Exceeds the limit"),
        (b'{"prompt": "a\\ud800", "answer": "b"}', "expected 'prompt' to be Unicode text, got half of a surrogate"),
        (b'["a", "b"]', "expected a JSON object, got a list"),
        (b'{"prompt": "\xff", "answer": "b"}', "expected UTF-8, got byte 0xff at byte 12"),
    ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path, line, message):
    path = write(tmp_path, b'{"prompt": "a", "answer": "b"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"d\.jsonl:2: {message}"):
        read_jsonl(path)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path, content):
    with pytest.raises(ValueError, match=r"d\.jsonl: expected a line .*, got an empty file"):
        read_jsonl(write(tmp_path, content))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data\.path: expected a readable file, got: No such file .*gone"):
        read_examples(DataConfig(task="addition", path=str(tmp_path / "gone"), holdout=0))


def test_500_lines_written_elsewhere_become_a_run(tmp_path):
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)[::-1]}) for a in range(20) for b in range(25)]
    config = DataConfig(task="addition", path=str(write(tmp_path, "\n".join(lines).encode())), holdout=512)
    examples = read_examples(config)
    data = PromptData(*split(config, examples, seed=0), encoding(examples), seed=0)
    assert (len(data), len(data.held_out)) == (450, 50)


def test_a_chat_template_surrounds_the_template_and_the_system_message():
    chat = ChatTemplate("{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}>", {}, "f")
    prompt = PromptConfig(template="Q {prompt}", stop=("<eos>",), chat=True, system="be brief")
    assert prompt.render("p1", chat) == "[system:be brief][user:Q p1]>"
    assert dataclasses.replace(prompt, system="").render("p1", chat) == "[user:Q p1]>"
    examples = numbered(2)
    tokenizer = CharTokenizer("".join(sorted(set("[]system:be briefuserQ p01>"))))
    encoding = Encoding(tokenizer=tokenizer, prompt=prompt, max_new_tokens=4, row_length=48, chat=chat)
    assert tokenizer.decode(PromptData(examples, [], encoding, 0).train[1].tokens) == "[system:be brief][user:Q p1]>"


def test_a_system_message_needs_a_chat_template():
    with pytest.raises(ValueError, match=r"prompt\.system: expected \"\" without prompt\.chat"):
        PromptConfig(template="{prompt}", stop=("<eos>",), system="be brief")


def test_an_answer_that_holds_the_stop_token_is_named_with_its_line():
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    built.add_special_tokens(["<eos>"])

    class Words(CharTokenizer):
        def encode(self, text):
            return np.array(built.encode(text).ids, np.int32)

        def token_id(self, token):
            return {"<eos>": 0}[token]

    bad = [Example(prompt="a", answer="a <eos>", where="f.jsonl:3")]
    words = Encoding(tokenizer=Words("a"), prompt=PLAIN, max_new_tokens=4, row_length=48)
    with pytest.raises(ValueError, match=r"^f\.jsonl:3: expected an answer without a stop token .*got '<eos>'"):
        PromptData(bad, [], words, 0)


def test_metadata_is_kept_for_the_reward(tmp_path):
    path = write(tmp_path, b'{"prompt": "a", "answer": "b", "metadata": {"unit": "cm"}}\n')
    (example,) = read_jsonl(path)
    assert PromptData([example], [], encoding([example]), 0).train[0].metadata == {"unit": "cm"}
    with pytest.raises(ValueError, match=r"d\.jsonl:1: expected 'metadata' to be an object, got a list"):
        read_jsonl(write(tmp_path, b'{"prompt": "a", "answer": "b", "metadata": []}\n'))


def test_worked_solutions_become_pairs_that_fit_the_row(tmp_path):
    path = write(tmp_path, b'{"prompt": "ab", "response": "cab"}\n')
    letters = dataclasses.replace(encoding(numbered(1)), tokenizer=CharTokenizer("abc"), row_length=6)
    assert read_supervised(path, letters) == [([2, 3], [4, 2, 3, 1])]
    with pytest.raises(
        ValueError, match=r"d\.jsonl:1: expected a prompt and a response of at most 5 tokens .*got 2 \+ 3"
    ):
        read_supervised(path, dataclasses.replace(letters, row_length=5))
    with pytest.raises(ValueError, match=r"d\.jsonl:1: expected the key 'response'"):
        read_supervised(write(tmp_path, b'{"prompt": "ab", "answer": "cab"}\n'), letters)
    with pytest.raises(ValueError, match=r"d\.jsonl: expected a line .*got an empty file"):
        read_supervised(write(tmp_path, b""), letters)
