"""Laws of what a sweep tries: what belongs to the target, each alone and after lookup, and no
engine or weights that the user did not allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from tiny_models import write_text_model

from lightning_specdec import ModelDrafter, SpeculativeDecoder
from lightning_specdec.bench import recommendation, ways
from lightning_specdec.bench.recommendation import command, pair_values, python_lines
from lightning_specdec.bench.ways import Drafting, Engine, Way, draftings, engines, matching_drafts
from lightning_specdec.config.kinds import Choice
from lightning_specdec.config.models import PairSource
from lightning_specdec.models.loading import examine


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two targets, and a head that belongs to the first one, beside it and in a run's place."""
    home = tmp_path_factory.mktemp("ways")
    write_text_model(home / "models" / "target")
    write_text_model(home / "models" / "other", seed=2)
    decoder = SpeculativeDecoder.from_pretrained(str(home / "models" / "target"), pack=False)
    vocab_size = decoder.target.vocab_size
    small = cases.MODELS["llama"](2, num_hidden_layers=1, vocab_size=vocab_size)
    draft = ModelDrafter(small)
    decoder.with_drafter(draft).save_draft(home / "models" / "head.safetensors")
    return home


@pytest.fixture(autouse=True)
def _in_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def target_decoder(name: str = "target") -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(f"models/{name}")


def test_draft_files_are_found_by_the_sha256_of_their_target() -> None:
    assert matching_drafts(target_decoder().target) == [Path("models/head.safetensors")]
    assert matching_drafts(target_decoder("other").target) == []
    known = ["models/head.safetensors"]
    assert matching_drafts(target_decoder().target, known) == []


def test_each_draft_is_tried_alone_and_after_lookup() -> None:
    decoder = target_decoder()
    source = PairSource(target="models/target")
    found = [kind.name for kind in draftings(decoder, source)]
    assert found == ["prompt lookup", "head", "prompt lookup, then head"]

    given = draftings(decoder, source, ["models/other"])
    assert [kind.name for kind in given] == [
        "prompt lookup",
        "other",
        "prompt lookup, then other",
        "other in int4",
        "prompt lookup, then other in int4",
    ]
    assert given[1].fields == {"draft": "models/other"}

    copies = draftings(decoder, source.changed(draft_quantization="int8"))
    assert [kind.name for kind in copies][1:] == ["int8 copy", "prompt lookup, then int8 copy"]

    chosen = draftings(decoder, source.changed(drafter=Choice("NGramDrafter", {"max_ngram": 3})))
    assert [kind.name for kind in chosen] == ["NGramDrafter(max_ngram=3)"]


def test_engines_are_those_that_the_user_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_decoder().target
    source = PairSource(target="models/target")
    present = torch.get_num_threads()
    assert engines(target, source) == [Engine("torch", present)], "small models use one number"

    monkeypatch.setattr(ways, "SMALL_MODEL", 0)
    monkeypatch.setattr(ways, "MOST_SMALL", 0)
    monkeypatch.setattr(ways, "check_openvino", lambda device: None)
    monkeypatch.setattr(ways, "is_busy", lambda: False)
    monkeypatch.setattr(ways.os, "sched_getaffinity", lambda pid: range(4))
    names = [engine.name for engine in engines(target, source)]
    counts = list(dict.fromkeys([present, 4, 1]))
    assert len(names) == 2 * len(counts)
    assert names[:2] == [f"torch, {Engine('torch', present).name[7:]}", names[1]]
    assert names[1].startswith("OpenVINO, ")

    given = engines(target, source.changed(backend="torch"), num_threads=3)
    assert given == [Engine("torch", 3)]
    monkeypatch.setattr(ways, "check_quantization", lambda kind, device: None)
    quantized = engines(target, source, num_threads=3, any_quantization=True)
    assert [engine.quantization for engine in quantized] == [None, None, "int8", "int8"]
    assert not any(engine.quantization for engine in engines(target, source))


WAY = Way(
    Engine("openvino", 2),
    Drafting("head", {"draft": "my head.safetensors", "drafter": Choice("NGramWithFallback")}),
    4,
)


def test_the_command_and_the_line_of_python_say_what_loads_a_way() -> None:
    source = WAY.source(PairSource(target="models/target"))
    flags = {"max_new_tokens": 8, "prompt": ["a b", "c"]}
    assert command(WAY, source, flags, threads=2) == (
        "lightning_specdec decode --target models/target --backend openvino "
        "--draft 'my head.safetensors' --drafter NGramWithFallback --max_new_tokens 8 "
        "--prompt 'a b' --prompt c --num_draft_tokens 4 --threads 2"
    )
    assert python_lines(WAY, source, threads=None, prompt="a b") == (
        "from lightning_specdec import SpeculativeDecoder\n"
        'decoder = SpeculativeDecoder.from_pretrained("models/target", "my head.safetensors", '
        'backend="openvino", drafter="NGramWithFallback", num_draft_tokens=4)'
    )
    assert python_lines(WAY, source, threads=2, prompt="a b").startswith(
        "import torch\nfrom lightning_specdec import SpeculativeDecoder\n"
        "torch.set_num_threads(2)\ndecoder = "
    )

    exit_way = Way(
        Engine("torch", 1),
        Drafting("exit 2", {"drafter": Choice("EarlyExitDrafter", {"exit_layer": 2})}),
        "auto",
    )
    exit_source = exit_way.source(PairSource(ckpt="a.safetensors"))
    assert "--drafter EarlyExitDrafter --drafter.exit_layer 2" in command(
        exit_way, exit_source, {}, threads=None
    )
    assert python_lines(exit_way, exit_source, threads=None, prompt="a b") == (
        "from lightning_specdec import SpeculativeDecoder\n"
        'decoder = SpeculativeDecoder.from_checkpoint("a.safetensors", backend="torch", '
        "drafter={'class_path': 'EarlyExitDrafter', 'init_args': {'exit_layer': 2}}, "
        'num_draft_tokens="auto")'
    )


def test_a_pair_has_the_draft_as_a_file_or_as_a_model() -> None:
    file_way = Way(Engine("torch", 1), Drafting("head", {"draft": "models/head.safetensors"}), 4)
    source = file_way.source(PairSource(target="models/target"))
    values = pair_values(file_way, source, description="x", threads=1)
    assert values["draft_file"] == "models/head.safetensors"
    assert values["target"]["source"] == "models/target"
    assert values["threads"] == 1

    model_way = Way(Engine("torch", 1), Drafting("other", {"draft": "models/other"}), 4)
    source = model_way.source(PairSource(target="models/target"))
    values = pair_values(model_way, source, description="x", threads=None)
    assert values["draft"]["source"] == "models/other"
    assert values["drafter"] == "CrossVocabulary"

    standard = Way(Engine("torch", 1))
    with pytest.raises(ValueError, match="drafts nothing"):
        pair_values(standard, source, description="x", threads=None)


def test_a_pair_keeps_what_loads_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def examine_target(name: str, **options: Any) -> Any:
        asked.append(options)
        return examine("models/target", dtype=options["dtype"])

    monkeypatch.setattr(recommendation, "examine", examine_target)
    options: dict[str, Any] = {"adapter": "tuned", "revision": "v1", "trust_remote_code": True}
    source = PairSource(target="hub/target", draft="hub/draft", draft_adapter="small", **options)
    way = Way(Engine("torch", 1), Drafting("draft"), 4)
    values = pair_values(way, source, description="x", threads=None)
    assert values["target"]["adapter"] == "tuned"
    assert values["target"]["revision"] == "v1"
    assert values["draft"]["adapter"] == "small"
    assert [options["trust_remote_code"] for options in asked] == [True, True]

    copy = PairSource(target="hub/target", draft_quantization="int8", **options)
    values = pair_values(way, copy, description="x", threads=None)
    assert values["draft"] == {**values["target"], "quantization": "int8"}


def test_a_pair_of_a_checkpoint_has_its_backend_and_no_other_target() -> None:
    way = Way(Engine("openvino", 1), Drafting("draft"), 4)
    values = pair_values(
        way, way.source(PairSource(ckpt="a.safetensors")), description="x", threads=None
    )
    assert values["backend"] == "openvino"
    checkpoint = PairSource(ckpt="a.safetensors")
    for changes in ({"target": "models/target"}, {"dtype": "float64"}):
        source = checkpoint.changed(**changes)
        with pytest.raises(ValueError, match="a pair of a checkpoint cannot have another"):
            pair_values(way, source, description="x", threads=None)


def test_drafts_of_one_name_are_told_apart() -> None:
    """Otherwise the second one would not be measured."""
    drafts = ["a/model.safetensors", "b/model.safetensors", "c/other.safetensors"]
    source = PairSource(target="models/target")
    decoder = target_decoder()
    names = [kind.name for kind in draftings(decoder, source, drafts)]
    assert [name for name in names if "lookup" not in name] == [*drafts[:2], "other"]

    chosen = source.changed(drafter=Choice("ModelDrafter"))
    assert len({kind.name for kind in draftings(decoder, chosen, drafts)}) == len(drafts)


def test_standard_decoding_is_a_command_too() -> None:
    way = Way(Engine("openvino", 2))
    words = command(way, way.source(PairSource(target="t")), {}, threads=None)
    assert words == "lightning_specdec decode --target t --backend openvino --mode standard"


def test_a_busy_machine_is_compared_with_one_thread_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what the warning about other programs is about: several threads wait for each
    other, and the whole comparison with them."""
    target = target_decoder().target
    source = PairSource(target="models/target", backend="torch")
    monkeypatch.setattr(ways, "SMALL_MODEL", 0)
    monkeypatch.setattr(ways.torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(ways.os, "sched_getaffinity", lambda pid: range(4))
    for load, counts in ((0.5, [4, 1]), (100.0 * (ways.os.cpu_count() or 1), [1, 4])):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, load, load))
        assert [engine.num_threads for engine in engines(target, source)] == counts
