"""Do messages become the prompt a template describes, and do its errors stay with the request?"""

import re

import pytest

from tokamak.errors import CheckpointError, TemplateError
from tokamak.text.chat_template import ChatTemplate

CONCATENATING = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)

TAKING_PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}"
    "{% if part['type'] == 'text' %}({{ part['text'] }}){% endif %}{% endfor %}{% endfor %}"
)

TAKING_EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
)

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def user(content):
    return [{"role": "user", "content": content}]


def test_messages_are_rendered_with_the_place_of_the_answer():
    prompt = ChatTemplate(CONCATENATING).render(user("hi"))

    assert prompt == "<user>hi\n<assistant>"


def test_the_place_of_the_answer_can_be_left_out():
    prompt = ChatTemplate(CONCATENATING).render(user("hi"), add_generation_prompt=False)

    assert prompt == "<user>hi\n"


def test_blocks_on_their_own_line_leave_no_line():
    source = (
        "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
    )

    assert ChatTemplate(source).render(user("hi")) == "hi\n"


@pytest.mark.parametrize(
    ("source", "form"),
    [(CONCATENATING, "string"), (TAKING_PARTS, "parts"), (TAKING_EITHER, "either")],
)
def test_what_content_a_template_takes_is_found_out(source, form):
    assert ChatTemplate(source).content_form == form


def test_a_template_that_would_print_a_list_gets_a_string():
    template = ChatTemplate("{% for m in messages %}{{ m.content | trim }}{% endfor %}")

    assert template.content_form == "string"
    assert template.render(user(PARTS)) == "one\ntwo"


@pytest.mark.parametrize(
    ("source", "from_parts", "from_text"),
    [
        (CONCATENATING, "<user>one\ntwo\n<assistant>", "<user>one\n<assistant>"),
        (TAKING_PARTS, "[user](one)(two)", "[user](one)"),
        (TAKING_EITHER, "(one)(two)", "one"),
    ],
)
def test_content_as_text_and_as_parts_reaches_every_template(source, from_parts, from_text):
    template = ChatTemplate(source)

    assert template.render(user(PARTS)) == from_parts
    assert template.render(user("one")) == from_text


def test_parts_that_are_no_text_are_refused_by_their_place():
    content = [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]

    with pytest.raises(TemplateError, match=r"messages\[0\].content .* 'image_url'") as refusal:
        ChatTemplate(TAKING_PARTS).render(user(content))

    assert refusal.value.field == "messages"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ messages[7].role }}", "has no element 7"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ 1 / 0 }}", "division"),
        ("{% include 'file' %}", "loader"),
        ("{{ range(10 ** 9) }}", "too big|too large|Range"),
    ],
)
def test_whatever_fails_while_rendering_is_the_requests_error(source, says):
    with pytest.raises(TemplateError) as refusal:
        ChatTemplate(source).render(user("hi"))

    assert refusal.value.field == "messages"
    assert re.search(says, refusal.value.message)


def test_content_that_is_null_is_an_error_only_where_the_template_needs_it():
    assert ChatTemplate("{{ messages[0].content or '-' }}").render(user(None)) == "-"
    with pytest.raises(TemplateError, match="NoneType"):
        ChatTemplate(CONCATENATING).render(user(None))


def test_text_that_is_no_unicode_is_refused():
    with pytest.raises(TemplateError, match=r"U\+D83D") as refusal:
        ChatTemplate(CONCATENATING).render(user("\ud83d"))

    assert refusal.value.field == "messages"


def test_messages_are_data_and_never_templates():
    text = "{{ raise_exception('x') }}{% for a in b %}"

    assert ChatTemplate(CONCATENATING).render(user(text)) == f"<user>{text}\n<assistant>"


def test_messages_of_the_caller_stay_as_they_are():
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "content": list(PARTS), "tool_calls": [call]}]

    ChatTemplate("{{ messages[0].content }}").render(messages)

    assert messages[0]["content"] == PARTS
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_arguments_of_tool_calls_are_values_in_a_template():
    call = {"id": "1", "function": {"name": "f", "arguments": '{"town": "Kraków"}'}}
    source = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"

    prompt = ChatTemplate(source).render([{"role": "assistant", "tool_calls": [call]}])

    assert prompt == '{"town": "Kraków"}'


def test_json_is_written_as_models_were_trained_on():
    source = "{{ {'b': '<é>', 'a': [1, 2]} | tojson }}|{{ {'a': 1} | tojson(indent=1) }}"

    assert ChatTemplate(source).render([]) == '{"b": "<é>", "a": [1, 2]}|{\n "a": 1\n}'


def test_formats_of_calls_and_reasoning_are_told_from_the_template():
    qwen = (
        "{% if tools %}{{ tools }}<tool_call>arguments</tool_call>{% endif %}"
        "{% for m in messages %}{% if '</think>' in m.content %}{% endif %}[{{ m.content }}]{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": "{}"}}
    template = ChatTemplate(qwen)

    assert (template.tool_format, template.reasoning_format) == ("hermes", "think_lines")
    assert template.render([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "[]"
    plain = ChatTemplate(CONCATENATING)
    assert (plain.tool_format, plain.reasoning_format) == (None, None)


def test_tools_reach_a_template_that_knows_them():
    source = "{% if tools %}{{ tools | length }}{% endif %}"

    assert ChatTemplate(source).render([], tools=[{"type": "function"}]) == "1"
    assert ChatTemplate(source).takes_tools


def test_tools_for_a_template_without_them_are_refused():
    with pytest.raises(TemplateError, match="knows no tools") as refusal:
        ChatTemplate(CONCATENATING).render(user("hi"), tools=[{"type": "function"}])

    assert refusal.value.field == "tools"


def test_variables_reach_a_template_that_takes_them():
    source = "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}"

    assert ChatTemplate(source).render([], enable_thinking=False) == "no"
    assert ChatTemplate(source).render([]) == ""


@pytest.mark.parametrize("name", ["no_such_thing", "raise_exception", "strftime_now"])
def test_variables_a_template_does_not_take_are_refused(name):
    template = ChatTemplate("{{ strftime_now('%Y') }}{% if style is defined %}x{% endif %}")

    with pytest.raises(TemplateError, match=name) as refusal:
        template.render([], **{name: "x"})

    assert refusal.value.field == "chat_template_kwargs"
    assert refusal.value.hint == "it takes: style"


def test_special_tokens_and_the_date_are_there():
    source = "{{ bos_token }}{{ strftime_now('%Y') }}{{ eos_token }}"

    prompt = ChatTemplate(source, bos_token="<s>", eos_token="</s>").render([])

    assert re.fullmatch(r"<s>\d{4}</s>", prompt)


def test_loops_can_be_left_and_training_marks_are_passed_over():
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )

    assert ChatTemplate(source).render(user("a") + user("b")) == "a"


def test_a_template_that_does_not_parse_is_the_models_error():
    with pytest.raises(CheckpointError, match=r"does not parse: .*line 2"):
        ChatTemplate("fine\n{% if %}")
