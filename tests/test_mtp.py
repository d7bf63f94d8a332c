"""Laws of prediction layers: they are loaded as in transformers, and draft the same tokens."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from resumed_rows import check_resumed_conversation
from safetensors.torch import load_file, save_file
from tiny_models import write
from tiny_mtp import FAMILIES, fitted_mtp, write_with_mtp
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.bench.ways import draftings
from lightning_specdec.checkpoints.engines import export
from lightning_specdec.config.models import PairSource
from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.drafters import Draft, MtpDrafter, NGramWithFallback
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import load_model
from lightning_specdec.models.mtp import MtpNetwork
from lightning_specdec.models.mtp_building import new_mtp
from lightning_specdec.models.mtp_files import load_mtp, stored_weights

PROMPTS = [[3], [1, 2, 3, 4, 5], [7, 7], [10, 9, 8, 7, 6, 5, 4]]
NUM_NEW = 14
every_family = pytest.mark.parametrize("family", FAMILIES)
some_families = pytest.mark.parametrize("family", ["deepseek_v3", "mellum"])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp")


@pytest.fixture
def directory(home: Path, family: str) -> Path:
    path = home / family
    if not path.exists():
        write_with_mtp(path, family)
    return path


@functools.cache
def decoder_of(directory: Path) -> SpeculativeDecoder:
    """A decoder that drafts with the layers of this checkpoint."""
    return SpeculativeDecoder.from_pretrained(str(directory), drafter="MtpDrafter", pack=False)


def target_of(directory: Path) -> HuggingFaceLM:
    target = decoder_of(directory).target
    assert isinstance(target, HuggingFaceLM)
    return target


@functools.cache
def theirs(directory: Path) -> tuple[Any, Any]:
    """The model and its prediction layers, as transformers loads both."""
    from transformers.modeling_layers import MtpModel

    auto_class: Any = AutoModelForCausalLM
    if "vision_config" in json.loads((directory / "config.json").read_text()):
        auto_class = AutoModelForImageTextToText
    model = auto_class.from_pretrained(directory).eval()
    if model.config.model_type not in ("mellum", "inkling_text", "step3p7"):
        # These classes know the number of layers of their large checkpoints only.
        last_layers = range(3, 3 + model.config.num_mtp_layers)
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{n}\." for n in last_layers]
    return model, MtpModel.from_pretrained(model).eval()


@torch.no_grad()
def their_proposals(directory: Path, text: Sequence[int], num_draft_tokens: int) -> list[int]:
    """What transformers' layers draft after a text, greedily and from an empty cache."""
    from transformers.cache_utils import MtpCache

    model, mtp = theirs(directory)
    ids = torch.tensor([text])
    hidden = model(ids[:, :-1], output_hidden_states=True, use_cache=False).hidden_states[-1]
    positions = torch.arange(1, len(text))[None]
    cache = MtpCache(config=model.config.get_mtp_config())
    tokens = ids[:, 1:]
    drafted: list[Tensor] = []
    for index in range(mtp.num_mtp_layers):
        hidden = mtp.forward_layer(index, hidden, positions, cache, input_ids=tokens)
        drafted.append(mtp._project_to_logits(hidden[:, -1:]).argmax(-1))
        tokens = torch.cat((tokens[:, 1:], drafted[-1]), dim=1)
        positions = positions + 1

    # Beyond their number, the last layer reads its own output.
    hidden = hidden[:, -1:]
    positions = positions[:, -1:]
    while len(drafted) < num_draft_tokens:
        last_layer = mtp.num_mtp_layers - 1
        hidden = mtp.forward_layer(last_layer, hidden, positions, cache, input_ids=drafted[-1])
        drafted.append(mtp._project_to_logits(hidden).argmax(-1))
        positions = positions + 1
    return [int(token) for token in drafted[:num_draft_tokens]]


@every_family
def test_the_loop_above_is_that_of_transformers(directory: Path) -> None:
    """Up to the number of layers, it drafts what `MtpModel` itself drafts."""
    from transformers.cache_utils import MtpCache

    model, mtp = theirs(directory)
    ids = torch.tensor([PROMPTS[3]])
    with torch.no_grad():
        hidden = model(ids[:, :-1], output_hidden_states=-1).hidden_states[-1]
        drafted, _, _ = mtp(
            input_ids=ids[:, 1:],
            last_hidden_states=hidden,
            attention_mask=None,
            position_ids=torch.arange(1, len(PROMPTS[3]))[None],
            mtp_cache=MtpCache(config=model.config.get_mtp_config()),
        )
    assert drafted[0].tolist() == their_proposals(directory, PROMPTS[3], drafted.shape[1])


def equal_layers(network: MtpNetwork, mtp: Any) -> bool:
    """Whether all weights equal those that transformers has loaded, which include the target's."""
    expected = {}
    for name, weight in mtp.state_dict().items():
        if name.startswith(("layers.", "shared_post_norm.")):
            expected[name.replace("shared_post_norm", "shared_norm")] = weight
    weights = network.state_dict()
    assert weights.keys() == expected.keys()
    return all(torch.equal(weight, expected[name]) for name, weight in weights.items())


@every_family
def test_the_layers_have_the_weights_that_transformers_loads(directory: Path) -> None:
    network = load_mtp(target_of(directory))
    _, mtp = theirs(directory)
    assert equal_layers(network, mtp)


@every_family
def test_what_is_written_is_what_was_read(directory: Path) -> None:
    target = target_of(directory)
    stored = load_file(directory / "model.safetensors")
    written = stored_weights(load_mtp(target), target)
    assert written
    for name, weight in written.items():
        assert torch.equal(weight, stored[name]), name


class Recording(MtpDrafter):
    """Keeps each row's text and its draft tokens."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.proposals: list[tuple[list[int], list[int]]] = []

    def propose(self, state: Any, request: Any, windows: Sequence[int], sampling: Any) -> Draft:
        draft = super().propose(state, request, windows, sampling)
        num_columns = draft.tokens.shape[1]
        lengths = [num_columns] * len(windows)
        if draft.lengths is not None:
            lengths = draft.lengths.tolist()
        for text, tokens, length in zip(request.texts, draft.tokens.tolist(), lengths, strict=True):
            if length:
                self.proposals.append((list(text), tokens[:length]))
        return draft


@pytest.mark.quick_cases("1-deepseek_v3", "8-deepseek_v3", "8-mellum")
@every_family
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
def test_ragged_rounds_propose_what_transformers_proposes_for_each_text(
    directory: Path, num_draft_tokens: int
) -> None:
    """With keys and values that are kept over rounds, rejections, and rows that end."""
    target = target_of(directory)
    drafter = Recording(network=load_mtp(target))
    result = speculative_decode(
        target, drafter, PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=num_draft_tokens
    )
    assert result.acceptance_rate is not None and 0.05 < result.acceptance_rate < 1
    assert len(drafter.proposals) > 10
    for text, tokens in drafter.proposals:
        assert tokens == their_proposals(directory, text, len(tokens))


def test_a_window_over_short_convolutions_is_that_of_a_whole_text() -> None:
    """In transformers, such layers have no window, so the whole text is read again instead."""
    target = HuggingFaceLM(
        tiny("inkling_text", 2, **{**FAMILIES["inkling_text"], "mtp_local_layer_ids": [0]})
    )
    fitted = fitted_mtp(target, num_steps=4)
    assert fitted.network.kinds == ["hybrid_sliding", "hybrid"]
    drafter = Recording(network=fitted.network)
    speculative_decode(target, drafter, PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=1)
    assert (
        max(len(text) for text, _ in drafter.proposals)
        > 3 * FAMILIES["inkling_text"]["sliding_window_size"]
    )
    for text, tokens in drafter.proposals:
        ids = torch.tensor([text])
        with torch.no_grad():
            hidden = target(ids[:, :-1], features=(2,)).features[2]
            output = drafter.network.read_text(target, ids, hidden)[0]
            logits = drafter.network.logits(target, output[:, -1:])
        assert tokens == logits[0].argmax(-1).tolist()


@every_family
@pytest.mark.parametrize("rule", ["ExactMatch", "RejectionSampling"])
def test_greedy_output_equals_standard_decoding_with_every_window(
    directory: Path, rule: str
) -> None:
    decoder = decoder_of(directory)
    expected = decoder.decode_standard(PROMPTS, max_new_tokens=NUM_NEW).tokens
    assert len({token for row in expected for token in row}) > 8
    for num_draft_tokens in range(1, 9):
        result = decoder.decode(
            PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=num_draft_tokens, rule=rule
        )
        assert result.tokens == expected


@every_family
def test_sampled_output_equals_standard_decoding_under_exact_match(directory: Path) -> None:
    decoder = decoder_of(directory)
    options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "temperature": 0.9, "seed": 4}
    expected = decoder.decode_standard(PROMPTS, **options).tokens
    for num_draft_tokens in (1, 4, 7):
        result = decoder.decode(
            PROMPTS, num_draft_tokens=num_draft_tokens, rule="ExactMatch", **options
        )
        assert result.tokens == expected


@some_families
def test_rows_of_a_batch_draft_as_they_do_alone(directory: Path) -> None:
    """Rejection sampling shows every probability of a draft in its tokens."""
    decoder = decoder_of(directory)
    options: dict[str, Any] = {
        "max_new_tokens": NUM_NEW,
        "num_draft_tokens": 5,
        "temperature": 0.8,
        "rule": "RejectionSampling",
    }
    together = decoder.decode(PROMPTS, **options)
    for index, prompt in enumerate(PROMPTS):
        alone = decoder.decode([prompt], indices=[index], **options)
        assert together.tokens[index] == alone.tokens[0]


@some_families
def test_fewer_layers_may_draft(directory: Path) -> None:
    """A single layer drafts its first token as before, and repeats itself for the others."""
    target = target_of(directory)
    drafter: Any = MtpDrafter.for_target(target, num_layers=1)
    assert len(drafter.network.layers) == 1
    expected = autoregressive_decode(target, PROMPTS, max_new_tokens=NUM_NEW).tokens
    result = speculative_decode(
        target, drafter, PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=6
    )
    assert result.tokens == expected
    with pytest.raises(ValueError, match="num_layers must be from 1 to"):
        MtpDrafter.for_target(target, num_layers=5)


@some_families
def test_a_resumed_conversation_equals_a_fresh_one(directory: Path) -> None:
    target = target_of(directory)
    drafter = MtpDrafter.for_target(target)
    check_resumed_conversation(target, drafter, PROMPTS[1])


def test_confidence_ends_drafts_early_and_changes_no_token(home: Path) -> None:
    target = target_of(_written(home, "deepseek_v3"))
    expected = autoregressive_decode(target, PROMPTS, max_new_tokens=NUM_NEW).tokens
    utilizations = []
    for min_confidence in (0.0, 0.5):
        drafter = MtpDrafter.for_target(target, min_confidence=min_confidence)
        result = speculative_decode(
            target, drafter, PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=6
        )
        assert result.tokens == expected
        utilizations.append(result.draft_utilization or 0.0)
    assert utilizations[1] > utilizations[0]


def _written(home: Path, family: str) -> Path:
    path = home / family
    if not path.exists():
        write_with_mtp(path, family)
    return path


def test_loading_the_layers_leaves_the_target_alone(home: Path) -> None:
    target = load_model(str(_written(home, "deepseek_v3")))
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    load_mtp(target)
    for name, weight in target.state_dict().items():
        assert torch.equal(weight, before[name])


def test_layers_that_the_config_lists_are_not_left_over(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_model(str(_written(home, "deepseek_v3")))
    assert "no place for" not in caplog.text


def test_layers_of_a_packed_target_draft_the_same(home: Path) -> None:
    path = _written(home, "glm4_moe")
    decoder = SpeculativeDecoder.from_pretrained(
        str(path), drafter="MtpDrafter", backend="torch", pack=True
    )
    expected = decoder_of(path).decode(PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=3)
    result = decoder.decode(PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=3)
    assert result.tokens == expected.tokens
    assert [row.rounds for row in result.rows] == [row.rounds for row in expected.rows]


def test_lookup_first_then_the_layers(home: Path) -> None:
    path = _written(home, "deepseek_v3")
    drafter = {"class_path": "NGramWithFallback", "init_args": {"mtp": True}}
    decoder = SpeculativeDecoder.from_pretrained(str(path), drafter=drafter, pack=False)
    assert isinstance(decoder.drafter, NGramWithFallback)
    assert isinstance(decoder.drafter.fallback, MtpDrafter)
    expected = decoder.decode_standard(PROMPTS, max_new_tokens=NUM_NEW).tokens
    assert decoder.decode(PROMPTS, max_new_tokens=NUM_NEW).tokens == expected

    both = {"class_path": "NGramWithFallback", "init_args": {"mtp": True, "exit_layer": 1}}
    with pytest.raises(ValueError, match="mtp names the draft already"):
        SpeculativeDecoder.from_pretrained(str(path), drafter=both, pack=False)


def test_a_sweep_tries_the_layers_of_a_checkpoint(home: Path) -> None:
    path = _written(home, "deepseek_v3")
    decoder = SpeculativeDecoder.from_pretrained(str(path), pack=False)
    kinds = draftings(decoder, PairSource(target=str(path)))
    names = [kind.name for kind in kinds]
    assert names[1:3] == ["prediction layers", "prompt lookup, then prediction layers"]
    assert kinds[1].found == "in the target's checkpoint: 2 multi-token prediction layers"


@every_family
def test_a_draft_file_keeps_the_layers(directory: Path, tmp_path: Path) -> None:
    decoder = decoder_of(directory)
    decoder.save_draft(tmp_path / "layers.safetensors")
    loaded = SpeculativeDecoder.from_pretrained(
        str(directory), str(tmp_path / "layers.safetensors"), pack=False
    )
    assert isinstance(loaded.drafter, MtpDrafter)
    expected = decoder.decode(PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=4)
    result = loaded.decode(PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=4)
    assert [row.rounds for row in result.rows] == [row.rounds for row in expected.rows]


@every_family
def test_trained_layers_are_written_back_into_the_checkpoint(
    directory: Path, tmp_path: Path
) -> None:
    target = load_model(str(directory))
    network = load_mtp(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))

    output = tmp_path / "trained"
    exported = export(output, MtpDrafter(network=network), target, "transformers")
    assert "use_mtp=True" in exported.commands[0]
    model, mtp = theirs(output)
    assert equal_layers(network, mtp)
    for name, weight in target.model.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name

    drafted = SpeculativeDecoder.from_pretrained(str(output), drafter="MtpDrafter", pack=False)
    standard = decoder_of(directory).decode_standard(PROMPTS, max_new_tokens=NUM_NEW)
    assert drafted.decode(PROMPTS, max_new_tokens=NUM_NEW).tokens == standard.tokens
    with pytest.raises(ValueError, match="engines read prediction layers from the target's own"):
        export(tmp_path / "other", MtpDrafter(network=network), target, "vllm")


# Refused


def _refusal(path: Path) -> str:
    target = load_model(str(path))
    with pytest.raises(ValueError) as refusal:
        MtpDrafter.for_target(target)
    kinds = draftings(SpeculativeDecoder(target), PairSource(target=str(path)))
    assert not any("prediction" in kind.name for kind in kinds)
    return str(refusal.value)


def test_a_checkpoint_without_layers_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "llama")
    assert _refusal(tmp_path / "llama").startswith(
        f"{tmp_path / 'llama'} holds no multi-token prediction layers"
    )


@pytest.mark.parametrize("name", ["mtp_dspark.0.gate.weight", "model.mtp_layers.0.eh_proj.weight"])
def test_layers_of_an_unknown_form_are_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "qwen3"
    write(path, "qwen3")
    file = path / "model.safetensors"
    save_file({**load_file(file), name: torch.zeros(2, 2)}, file, {"format": "pt"})
    assert _refusal(path).startswith(
        f"the multi-token prediction layers of {path} cannot be used: "
        f"the form of these layers is not known (as {name})"
    )


def test_missing_weights_are_named(home: Path, tmp_path: Path) -> None:
    whole = _written(home, "deepseek_v3")
    weights = load_file(whole / "model.safetensors")
    del weights["model.layers.4.eh_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    target = load_model(str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot be loaded: they lack layers\.1\.eh_proj\.weight"):
        MtpDrafter.for_target(target)


def _in_blocks(weight: torch.Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A weight as 8-bit floats, and the scale of each block."""
    num_rows, num_columns = weight.shape
    scales = torch.empty(-(-num_rows // rows), -(-num_columns // columns))
    quantized = torch.empty_like(weight)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = (
                slice(row * rows, (row + 1) * rows),
                slice(column * columns, (column + 1) * columns),
            )
            scales[row, column] = weight[part].abs().max() / 448
            quantized[part] = weight[part] / scales[row, column]
    return quantized.to(torch.float8_e4m3fn), scales


def _quantized(home: Path, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Write layers whose linear weights are 8-bit floats with a scale for 16 rows and 12 columns.

    Returns the stored weights, and those that they stand for.
    """
    whole = _written(home, "deepseek_v3")
    stored = load_file(whole / "model.safetensors")
    meant = dict(stored)
    for name in [name for name in stored if name.startswith(("model.layers.3", "model.layers.4"))]:
        if stored[name].dim() == 2 and "norm" not in name and "eh_proj" not in name:
            quantized, scales = _in_blocks(stored[name], 16, 12)
            stored[name] = quantized
            stored[f"{name}_scale_inv"] = scales
            for row in range(quantized.shape[0]):
                for column in range(quantized.shape[1]):
                    scale = scales[row // 16, column // 12]
                    meant[name][row, column] = quantized[row, column].float() * scale
    path.mkdir()
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text((whole / "config.json").read_text())
    return stored, meant


def test_layers_of_8_bit_floats_are_read_as_the_weights_that_they_stand_for(
    home: Path, tmp_path: Path
) -> None:
    stored, meant = _quantized(home, tmp_path / "quantized")
    assert any(name.endswith("experts.0.up_proj.weight_scale_inv") for name in stored)
    target = load_model(str(tmp_path / "quantized"))
    assert isinstance(target, HuggingFaceLM)
    target.model.config.quantization_config = {
        "quant_method": "fp8",
        "weight_block_size": [16, 12],
    }
    network = load_mtp(target)
    assert network.dtype == torch.float32
    written = stored_weights(network, target)
    for name, weight in written.items():
        assert torch.equal(weight, meant[name]), name


def test_layers_that_are_quantized_in_another_way_are_refused(home: Path, tmp_path: Path) -> None:
    stored, _ = _quantized(home, tmp_path / "quantized")
    name = "model.layers.3.self_attn.o_proj.weight"
    file = tmp_path / "quantized" / "model.safetensors"
    for weights, dtype in (
        ({key: weight for key, weight in stored.items() if key != f"{name}_scale_inv"}, "F8_E4M3"),
        ({**stored, name: torch.zeros(4, 4, dtype=torch.int32)}, "I32"),
    ):
        save_file(weights, file, {"format": "pt"})
        assert f"they are quantized ({name} is stored as {dtype}), and only plain" in _refusal(
            tmp_path / "quantized"
        )


def test_a_model_from_memory_has_no_checkpoint_to_load_from() -> None:
    with pytest.raises(ValueError, match="was not loaded from a checkpoint"):
        MtpDrafter.for_target(HuggingFaceLM(tiny("deepseek_v3")))


def test_a_text_shorter_than_the_layers_reach_has_no_outputs_of_the_last_ones(home: Path) -> None:
    target = target_of(_written(home, "deepseek_v3"))
    outputs = load_mtp(target).read_text(target, torch.tensor([[3, 4]]), torch.ones(1, 2, 32))
    assert [output.shape[1] for output in outputs] == [1, 0]


def test_a_family_without_such_layers_cannot_get_new_ones() -> None:
    with pytest.raises(ValueError, match="no prediction layers can be built for GPT2LMHeadModel"):
        new_mtp(HuggingFaceLM(tiny("gpt2")), 1)


def test_a_drafter_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="MtpDrafter has no layers: name it as the drafter"):
        SpeculativeDecoder(tiny("llama"), MtpDrafter())


def test_layers_of_another_target_are_refused(home: Path) -> None:
    network = load_mtp(target_of(_written(home, "deepseek_v3")))
    with pytest.raises(ValueError, match="for a hidden size of 32, the target has 16"):
        SpeculativeDecoder(tiny("llama", hidden_size=16), MtpDrafter(network=network))
