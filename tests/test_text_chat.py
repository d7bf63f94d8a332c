"""Laws of chats: what was said stays as it was decoded, and what is added is what the template adds."""

from __future__ import annotations

import random

import pytest
import text_cases

from lightning_specdec.text.chat import Chat
from lightning_specdec.text.tokenizer import TextTokenizer

QUESTIONS = ["the oak", "Où est\nl'été ?", "  thunder ", "🌩", ""]
TRIMMING = text_cases.CHATML.replace("message['content']", "message['content'] | trim")
INSTRUCT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<s>[I] {{ m['content'] }} [/I]"
    "{% else %} {{ m['content'] | trim }} </s>{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEMPLATES = {"chatml": text_cases.CHATML, "trimming": TRIMMING, "instruct": INSTRUCT, "plain": PLAIN}


def of_kind(kind: str, template: str = "chatml") -> TextTokenizer:
    tokenizer = text_cases.TOKENIZERS[kind]()
    tokenizer.chat_template = TEMPLATES[template]
    return TextTokenizer(tokenizer)


def words(tokenizer: TextTokenizer, generator: random.Random) -> list[int]:
    """An answer that no tokenizer would have cut into these tokens."""
    pieces = tokenizer.vocabulary.token_bytes
    plain = [i for i, piece in enumerate(pieces) if piece and piece.isascii() and piece.decode().isprintable()]
    return [generator.choice(plain) for _ in range(generator.randint(1, 9))]


@pytest.mark.parametrize("system", [None, "You are an oak."])
@pytest.mark.parametrize("kind", text_cases.BY_BYTES)
def test_answers_in_the_tokenizers_own_tokens_give_the_encoding_of_the_whole_chat(
    kind: str, system: str | None
) -> None:
    tokenizer = of_kind(kind)
    chat, tokens = Chat(tokenizer, system=system), [-1]
    for question in QUESTIONS:
        prompt = chat.ask(question)
        messages = [*chat.messages, {"role": "user", "content": question}]
        assert prompt == tokenizer.encode_chat(messages)
        whole = tokenizer.encode_chat([*messages, {"role": "assistant", "content": "the oak fell"}])
        behind = whole[len(prompt) :]
        tokens = behind[: behind.index(2) + 1]
        assert whole[: len(prompt)] == prompt and chat.answer(tokens) == "the oak fell"


@pytest.mark.parametrize("ending", [True, False], ids=["eos", "cut short"])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", text_cases.BY_BYTES)
def test_what_was_decoded_stays_and_the_text_is_the_templates(kind: str, template: str, ending: bool) -> None:
    generator, tokenizer = random.Random(1), of_kind(kind, template)
    for _ in range(20):
        chat, before = Chat(tokenizer), list[int]()
        for question in QUESTIONS:
            prompt = chat.ask(question)
            assert prompt[: len(before)] == before
            rendered = tokenizer.render_chat([*chat.messages, {"role": "user", "content": question}])
            shown = tokenizer.decode(prompt, show_special=True)
            # What differs is white space alone: what a template trims, a tokenizer adds, or the model wrote.
            assert "".join(shown.split()) == "".join(rendered.split())
            if kind == "byte_level" and template == "chatml":
                assert shown == rendered
            answer = words(tokenizer, generator)
            if ending and template != "plain":
                answer.append(2)
            text = chat.answer(answer)
            assert text == tokenizer.decode(answer) == chat.messages[-1]["content"]
            before = [*prompt, *answer]


def test_an_end_that_is_not_the_templates_is_replaced_by_it() -> None:
    tokenizer = of_kind("byte_level")
    tokenizer.eos |= {3}
    chat = Chat(tokenizer)
    prompt, answer = chat.ask("the oak"), tokenizer.encode(" fell")
    assert chat.answer([*answer, 3]) == " fell"
    after = chat.ask("and then?")
    assert after[: len(prompt) + len(answer) + 1] == [*prompt, *answer, 2] and 3 not in after
    assert tokenizer.decode(after, show_special=True) == tokenizer.render_chat(
        [*chat.messages, {"role": "user", "content": "and then?"}]
    )


@pytest.mark.parametrize("kind", text_cases.BY_BYTES)
def test_an_answer_that_a_stop_string_ended_stays_without_it(kind: str) -> None:
    generator, tokenizer = random.Random(2), of_kind(kind)
    table = tokenizer.vocabulary.token_bytes
    for _ in range(100):
        chat = Chat(tokenizer)
        prompt, answer = chat.ask("the oak"), words(tokenizer, generator)
        num_bytes = sum(len(table[token] or b"") for token in answer)
        num_cut = generator.randint(0, num_bytes)
        text = chat.answer(answer, num_cut=num_cut)
        whole = tokenizer.decode(answer)
        assert text == whole[: max(len(whole) - num_cut, 0)]
        after = chat.ask("and then?")
        num_kept = next(
            n
            for n in range(len(answer), -1, -1)
            if sum(len(table[t] or b"") for t in answer[:n]) <= num_bytes - num_cut
        )
        assert after[: len(prompt) + num_kept] == [*prompt, *answer[:num_kept]]
        rendered = tokenizer.render_chat([*chat.messages, {"role": "user", "content": "and then?"}])
        shown = tokenizer.decode(after, show_special=True)
        assert "".join(shown.split()) == "".join(rendered.split())


def test_a_template_that_rewrites_what_was_said_is_encoded_anew() -> None:
    tokenizer = of_kind("byte_level")
    tokenizer.tokenizer.chat_template = text_cases.CHATML.replace(
        "message['content']", "message['content'].split('=')[-1]"
    )
    chat = Chat(tokenizer)
    chat.ask("the oak")
    chat.answer([*tokenizer.encode("thinking= it fell"), 2])
    messages = [*chat.messages, {"role": "user", "content": "why?"}]
    assert chat.ask("why?") == tokenizer.encode_chat(messages)
    assert "thinking" not in tokenizer.decode(chat.ask("why?"))


def test_to_ask_again_is_to_ask_anew_and_an_empty_answer_is_one() -> None:
    tokenizer = of_kind("byte_level")
    chat = Chat(tokenizer)
    chat.ask("never mind")
    prompt = chat.ask("the oak")
    assert prompt == tokenizer.encode_chat([{"role": "user", "content": "the oak"}]) and chat.messages == []
    assert chat.answer([]) == ""
    assert tokenizer.decode(chat.ask("so?"), show_special=True).endswith(
        "assistant\n</s>\n<s>user\nso?</s>\n<s>assistant\n"
    )
