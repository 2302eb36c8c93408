"""The Trainer of Hugging Face Transformers over the engine: a small BERT that starts from random weights, so nothing is downloaded.

    torchrun --nproc-per-node 2 examples/hf_trainer.py

It learns whether a sequence of tokens holds more of the first or of the second half of the vocabulary.
"""

import argparse
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

TOKENS, LENGTH = 10, 9


class Sequences(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(TOKENS, (count, LENGTH), generator=generator)
        self.labels = ((self.tokens >= TOKENS // 2).sum(1) > LENGTH // 2).long()

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def accuracy(prediction):
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--output", help="folder of checkpoints; without it none are kept")
given = parser.parse_args()

dist.init_process_group("collective")  # the Trainer uses a process group that is there, and would choose "gloo" itself
options = TrainingArguments(
    output_dir=given.output or tempfile.mkdtemp(),
    use_cpu=not torch.cuda.is_available(),  # without a GPU it uses no process group unless told so
    num_train_epochs=given.epochs,
    per_device_train_batch_size=32,
    per_device_eval_batch_size=128,
    learning_rate=3e-3,
    logging_steps=16,
    save_strategy="epoch" if given.output else "no",
    report_to="none",
    disable_tqdm=True,
)
torch.manual_seed(0)
config = BertConfig(vocab_size=TOKENS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=options,
    train_dataset=Sequences(2048, seed=1),
    eval_dataset=Sequences(512, seed=2),
    compute_metrics=accuracy,
)
trainer.train()
result = trainer.evaluate()
weights = sum(parameter.detach().double().sum().item() for parameter in trainer.model.parameters())
rank, size = options.process_index, options.world_size
print(f"rank {rank} of {size}: accuracy {result['eval_accuracy']:.3f}, sum of weights {weights:.9f}", flush=True)
dist.destroy_process_group()
