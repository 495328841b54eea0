import json

import pytest

from train.chat import ChatTemplate, stop_tokens
from train.tokenizer import CharTokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "1+1?"}]


def folder_with(tmp_path, **files):
    for name, content in files.items():
        name = name.replace("__", ".")
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def test_a_template_is_found_in_its_own_file_before_the_config(tmp_path):
    folder = folder_with(tmp_path, tokenizer_config__json={"chat_template": "old"}, chat_template__jinja=CHATML)
    rendered = ChatTemplate.from_folder(folder).render(USER)
    assert rendered == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "entry", [CHATML, [{"name": "rag", "template": "no"}, {"name": "default", "template": CHATML}]]
)
def test_a_template_is_found_in_the_config_plain_or_named(tmp_path, entry):
    folder = folder_with(tmp_path, tokenizer_config__json={"chat_template": entry})
    assert ChatTemplate.from_folder(folder).render(USER).endswith("<|im_start|>assistant\n")


def test_special_tokens_loop_controls_json_and_the_generation_block_work(tmp_path):
    source = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}{{ eos_token }}"
    )
    config = {"chat_template": source, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    template = ChatTemplate.from_folder(folder_with(tmp_path, tokenizer_config__json=config))
    assert template.render([{"role": "system", "content": "x"}, {"role": "user", "content": "<é>"}]) == '<s>"<é>"</s>'


def test_a_template_refuses_in_its_own_words():
    template = ChatTemplate("{% if messages|length > 1 %}{{ raise_exception('one message') }}{% endif %}ok", {}, "f")
    assert template.render(USER) == "ok"
    with pytest.raises(ValueError, match=r"chat template: TemplateError: one message \(f\)"):
        template.render(USER * 2)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source):
    with pytest.raises(ValueError, match="chat template: SecurityError"):
        ChatTemplate(source, {}, "f").render(USER)


def test_a_template_sees_no_clock():
    assert (
        ChatTemplate("{% if strftime_now is defined %}today{% else %}fixed{% endif %}", {}, "f").render(USER) == "fixed"
    )


def test_what_is_no_template_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"chat template: expected Jinja, got: .*\(f\)"):
        ChatTemplate("{% if %}", {}, "f")
    with pytest.raises(ValueError, match=r"chat_template\.jinja, or the key chat_template .*prompt\.chat=false"):
        ChatTemplate.from_folder(tmp_path)


def test_stop_tokens_are_all_that_the_files_name_and_disagreements_are_said(tmp_path):
    tokenizer = CharTokenizer("abc")
    folder = folder_with(
        tmp_path,
        config__json={"eos_token_id": 1},
        generation_config__json={"eos_token_id": [1, 3]},
        tokenizer_config__json={"eos_token": "b"},
    )
    found = stop_tokens(folder, tokenizer)
    assert found.ids == (1, 3)
    assert found.disagreements(tokenizer) == [
        "config.json names 1 ('<eos>') and not 3 ('b')",
        "tokenizer_config.json names 3 ('b') and not 1 ('<eos>')",
    ]


def test_files_that_agree_or_are_absent_disagree_with_nothing(tmp_path):
    tokenizer = CharTokenizer("abc")
    assert stop_tokens(tmp_path, tokenizer).ids == ()
    folder = folder_with(tmp_path, config__json={"eos_token_id": 1}, generation_config__json={"eos_token_id": None})
    found = stop_tokens(folder, tokenizer)
    assert (found.ids, found.disagreements(tokenizer)) == ((1,), [])


@pytest.mark.parametrize("eos", [99, "x", True, [1, -1]])
def test_a_stop_that_is_no_token_is_refused_with_its_file(tmp_path, eos):
    with pytest.raises(ValueError, match=r"config\.json: expected eos_token_id in 0 to 4"):
        stop_tokens(folder_with(tmp_path, config__json={"eos_token_id": eos}), CharTokenizer("abc"))


def test_a_broken_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"generation_config\.json: expected JSON"):
        stop_tokens(folder_with(tmp_path, generation_config__json="{"), CharTokenizer("abc"))
