"""Convert GGUF to a float32 Hugging Face directory (``python -m store.model_weights.gguf_conversion``).

Only the child imports PyTorch and transformers; its memory (about eight bytes per parameter) ends with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec

from policy.errors import ModelUnavailable
from store.progress_report import ProgressLine, Report

COMMAND = (sys.executable, "-m", "store.model_weights.gguf_conversion")


def convert(command: tuple[str, ...], source: Path, target: Path, report: Report) -> None:
    """Run ``command source target``, with its JSON progress lines to ``report``; ``target`` must be new.

    Raises :class:`policy.errors.ModelUnavailable` with the end of the child's output if it fails.
    """
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [*command, str(source), str(target)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        )
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if line.startswith(b"{"):
                    report(msgspec.json.decode(line, type=ProgressLine))
            code = child.wait()
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
            if child.stdin is not None:
                child.stdin.close()
        if code != 0:
            errors.seek(0)
            end = errors.read().decode(errors="replace").strip().splitlines()[-3:]
            raise ModelUnavailable(f"converting {source.name} failed with status {code}: {' | '.join(end)}")


def _end_with_parent() -> None:
    """Exit at the end of standard input, a pipe that the parent holds open and never writes."""

    def watch() -> None:
        os.read(0, 1)  # not sys.stdin: its lock, held here, would abort the exit of the interpreter
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _say(step: str, message: str, fraction: float) -> None:
    sys.stdout.write(json.dumps({"step": step, "message": message, "fraction": fraction}) + "\n")
    sys.stdout.flush()


def main(source: Path, target: Path) -> None:
    """Write weights, configuration, tokenizer and chat template of ``source`` to ``target``.

    Weights are float32: CPUs without bfloat16 units emulate it 5 to 8 times slower. GPU engines cast on load.
    """
    _end_with_parent()
    _say("convert", "loading PyTorch and transformers", 0.0)
    import torch  # noqa: PLC0415  the parent imports this module, but not PyTorch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    _say("convert", f"reading the weights of {source.name}", 0.25)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    _say("convert", f"reading the tokenizer of {source.name}", 0.75)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if not tokenizer.chat_template:
        _say("convert", f"{source.name} has no chat template: completions only", 0.85)
    _say("convert", "writing safetensors", 0.9)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _say("convert", "converted", 1.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
