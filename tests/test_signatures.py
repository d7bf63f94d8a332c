"""Public signatures say what they take, and every type in them is documented."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_specdec
from lightning_specdec import (
    NGramDrafter,
    RejectionSampling,
    SpeculativeDecoder,
    TypicalAcceptance,
)
from lightning_specdec.config.kinds import DRAFTERS, RULES
from lightning_specdec.config.models import PairSource
from lightning_specdec.config.settings import setting_fields

API = Path(__file__).parents[1] / "docs" / "api.md"
COMMON_TYPES = {
    *("Any", "None", "Sequence", "Mapping", "Iterator", "Iterable", "Callable", "PathLike"),
    *("Tensor", "Int", "Float", "Bool", "Module", "PreTrainedModel"),
}
SHAPES = re.compile(r"\b[A-Z]\d?\b")
"""Letters of shapes, such as B and K1."""
DOCUMENTED = [
    *("SpeculativeDecoder", "Session", "DecodingConfig", "generate", "autoregressive_decode"),
    *("Sampling", "ExactMatch", "RejectionSampling", "EpsilonThreshold", "TypicalAcceptance"),
    *("get_pair", "list_pairs", "load_model"),
]


def functions_of(public_name: str) -> Iterator[tuple[str, Any]]:
    """A public function, or the constructor and the public methods and properties of a class."""
    value = getattr(lightning_specdec, public_name)
    yield public_name, value
    if not isinstance(value, type):
        return
    for name, member in vars(value).items():
        function = getattr(member, "__func__", member)
        if isinstance(member, property):
            function = member.fget
        if not name.startswith("_") and inspect.isfunction(function):
            yield f"{public_name}.{name}", function


@pytest.mark.parametrize("public_name", DOCUMENTED)
def test_every_type_in_a_public_signature_is_documented(public_name: str) -> None:
    documented = set(re.findall(r"^::: \S+\.(\w+)$", API.read_text(), re.MULTILINE))
    for name, function in functions_of(public_name):
        signature = inspect.signature(function)
        annotations = [parameter.annotation for parameter in signature.parameters.values()]
        for annotation in [*annotations, signature.return_annotation]:
            if annotation is inspect.Signature.empty:
                continue
            text = re.sub(r"""["'].*?["']""", "", str(annotation))
            types = set(re.findall(r"\b[A-Z]\w+", text)) - COMMON_TYPES
            undocumented = {word for word in types if not SHAPES.fullmatch(word)} - documented
            assert not undocumented, (name, annotation)


@pytest.mark.parametrize("registry", [DRAFTERS, RULES], ids=["drafters", "rules"])
def test_a_constructor_shows_its_settings_instead_of_values_and_settings(registry: Any) -> None:
    for name in registry:
        kind = registry.load(name)
        parameters = inspect.signature(kind).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, name
    assert list(inspect.signature(TypicalAcceptance).parameters) == ["epsilon", "delta"]
    shown = inspect.signature(NGramDrafter).parameters
    for field in setting_fields(NGramDrafter.Settings):
        assert shown[field.name].default == field.default


@pytest.mark.parametrize("method", ["from_checkpoint", "from_pretrained", "from_pair"])
def test_loading_shows_the_fields_of_a_pair_source_with_their_defaults(method: str) -> None:
    function = getattr(SpeculativeDecoder, method)
    parameters = inspect.signature(function).parameters
    fields = {field.name: field for field in setting_fields(PairSource)}
    assert {"device", "dtype", "drafter", "num_draft_tokens", "pack"} <= parameters.keys()
    assert parameters["device"].default is None
    assert not any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    for name in parameters.keys() & fields.keys() - {"draft", "target"}:
        assert parameters[name].default == fields[name].default
        assert f"{name}: {fields[name].metadata['help']}" in function.__doc__


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: RejectionSampling(temperature=0.5),
            "RejectionSampling has no setting temperature: it is an argument of decoding, as "
            "decode(..., rule=RejectionSampling(), temperature=0.5)",
        ),
        (lambda: RejectionSampling(1), "RejectionSampling got 1 arguments: it has no settings"),
        (
            lambda: NGramDrafter(max_gram=3),
            "NGramDrafter has no setting max_gram: did you mean max_ngram?",
        ),
        (lambda: NGramDrafter(3, max_ngram=3), "NGramDrafter got max_ngram twice"),
        (lambda: NGramDrafter(1, 1, 2, 3), "NGramDrafter got 4 arguments: it takes max_ngram, min"),
        (
            lambda: SpeculativeDecoder.from_pretrained("x", dtyp=torch.float16),
            "unknown setting dtyp: did you mean dtype?",
        ),
    ],
)
def test_an_argument_that_does_not_exist_is_named(build: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        build()
    assert message in str(caught.value)
