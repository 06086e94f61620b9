"""The Trainer of Hugging Face Transformers, with a small language model made here.

torchrun --nproc-per-node 2 examples/torch_backend/transformers_trainer.py
"""

import argparse
import tempfile

import fastdist  # registers the backend; torch 2.14 finds it without this line
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Counting(torch.utils.data.Dataset):
    """Sequences that count up from a random number."""

    def __init__(self, count: int) -> None:
        begins = torch.randint(100, (count, 1), generator=torch.Generator().manual_seed(0))
        self.rows = (begins + torch.arange(16)) % 100

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="fastdist")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    # Made before, since on the CPU Accelerate, which Trainer uses, makes none but Gloo's.
    torch.distributed.init_process_group(options.backend)
    set_seed(0)
    config = GPT2Config(vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            use_cpu=True,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Counting(1024))
        result = trainer.train()
        loss = trainer.evaluate(Counting(64))["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"loss {loss:.4f} after {result.global_step} steps")


if __name__ == "__main__":
    main()
