"""The Trainer's verbs: a short help without imports; everything else is LightningCLI's, in `training.cli`."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_specdec.config.pairs import shipped_directory
from lightning_specdec.config.terminal import say

SUMMARIES = {
    "fit": "train target and drafts from a YAML",
    "validate": "measure on the validation sequences",
    "test": "measure on the held-out sequences",
    "generate": "write a target's own text, to train drafts on; run again to go on",
}
_EXAMPLES = {
    "fit": """\
lightning_specdec fit --config configs/rnn.yaml
lightning_specdec fit --config configs/rnn.yaml --ckpt_path last --trainer.max_epochs 200
lightning_specdec fit --config configs/rnn.yaml --data SequenceFile --data.path mine.csv
lightning_specdec fit --model.help PairTraining""",
    "generate": """\
lightning_specdec generate --config configs/smollm2_generate.yaml
lightning_specdec generate --model GenerateText --model.target ./llama --model.output data/llama \\
    --data PromptFiles --data.paths prompts.txt
lightning_specdec generate --model.help GenerateText""",
}
_OPTIONS = """\
  --config FILE         YAML of the run; repeat to lay one over another
  --ckpt_path FILE      last, best or a checkpoint: fit resumes from it, the others use it
  --save_seconds X      seconds between checkpoints while fit runs (default 60)
  --seed_everything INT seed of initialization and data order
  --trainer.KEY VALUE   any argument of Lightning's Trainer, as --trainer.max_epochs 10
  --model CLASS         training module, as PairTraining; --model.KEY VALUE sets its arguments
  --data CLASS          data module, as SequenceFile; --data.KEY VALUE sets its arguments
  --model.help CLASS    every argument of a module; likewise --data.help CLASS
  --print_config        print the resolved configuration and stop
  --help_all            every argument of the Trainer (slow: imports it)
  --debug               show the traceback of an error"""


def run(verb: str, words: list[str]) -> int:
    """Show the help, or hand over to LightningCLI, which reads `sys.argv`."""
    if {"-h", "--help"} & set(words):
        configs = sorted(path.stem for path in shipped_directory().parent.glob("*.yaml"))
        example = _EXAMPLES.get(verb, f"lightning_specdec {verb} --config configs/rnn.yaml --ckpt_path last")
        say(f"usage: lightning_specdec {verb} --config FILE [options]\n\n{SUMMARIES[verb]}\n\noptions:\n{_OPTIONS}\n")
        say(f"configs that ship (configs/NAME.yaml): {', '.join(configs)}\n\nexamples:\n{example}")
        return 0
    sys.argv[2:] = ["--help" if word == "--help_all" else _found(word) for word in words if word != "--debug"]
    from lightning_specdec.training.cli import run

    run()
    return 0


def _found(word: str) -> str:
    """A shipped config by its name `configs/NAME.yaml`, where the current directory has no such file."""
    shipped = shipped_directory().parent / word.removeprefix("configs/")
    return str(shipped) if word.startswith("configs/") and not Path(word).exists() and shipped.is_file() else word
