"""A ResNet trained as on ImageNet: warm-up of the learning rate, several batches per sum, validation, checkpoints in the background.

    python -m collective_core.launch -np 2 python examples/pytorch_imagenet_resnet.py --checkpoints /tmp/resnet

Started again with the same folder, it continues after the last whole checkpoint. The images are made here, and the network is small
enough for a core; `load` and `ResNet` are what to replace by your data set and torchvision's `resnet50`.
"""

import argparse

import collective_core.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES, SIZE = 4, 24


class Block(nn.Module):
    """Two convolutions, and around them the input as it was, or brought to the new number of channels."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Sequential):
    def __init__(self):
        stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        blocks = [Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2)]
        super().__init__(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


def load(count, seed):
    """Images of stripes in one of four directions, in random colours and places, with noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angle = labels * torch.pi / CLASSES
    phase, colour = torch.rand(count, 1, 1, generator=generator) * 6.3, torch.rand(count, 3, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    across = x * torch.cos(angle).view(-1, 1, 1) + y * torch.sin(angle).view(-1, 1, 1)
    images = torch.sin(across + phase).unsqueeze(1) * colour
    return TensorDataset(images + 0.3 * torch.randn(count, 3, SIZE, SIZE, generator=generator), labels)


def learning_rate(epoch):
    """Grows during the first epoch from that of one rank to that of all (Goyal et al., 2017, section 2.2), and falls after the sixth."""
    ranks = hvd.size() * given.batches_per_sum
    return given.lr * (1 + min(epoch, 1.0) * (ranks - 1)) * (0.1 if epoch >= 6 else 1.0)


def validate():
    """Accuracy over all ranks' parts of the validation set."""
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for images, labels in validation:
            right += torch.tensor([(model(images.to(device)).argmax(1) == labels.to(device)).sum(), len(labels)])
    model.train()
    right = hvd.allreduce(right, op=hvd.Sum, name="right")
    return float(right[0] / right[1])


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--checkpoints", default="checkpoints", help="folder on rank 0's host")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=16, help="per rank")
parser.add_argument("--batches-per-sum", type=int, default=2, help="batches whose gradients are added before the ranks sum them")
parser.add_argument("--lr", type=float, default=0.02, help="of one rank and batch")
given = parser.parse_args()

hvd.init()
# Each rank has a GPU, if there are any.
device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
train_set, validation_set = load(1024, seed=1), load(256, seed=2)
# Every sample on one rank, once; knows where an epoch stands.
sampler = hvd.ShardSampler(train_set, seed=0)
training = DataLoader(train_set, batch_size=given.batch_size, sampler=sampler, drop_last=True)
validation = DataLoader(validation_set, batch_size=64, sampler=hvd.ShardSampler(validation_set, shuffle=False))

model = ResNet().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=given.lr, momentum=0.9, weight_decay=1e-4)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=given.batches_per_sum, compression=hvd.Compression.fp16
)

checkpoints = hvd.Checkpoints(given.checkpoints, keep=2, model=model, optimizer=optimizer, sampler=sampler)
found = checkpoints.restore()  # the state of the last whole checkpoint, on all ranks; {} where there is none
if found and hvd.rank() == 0:
    print(f"continued after epoch {found['epoch']}", flush=True)
if not found:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

accuracy = found.get("accuracy", 0.0)
for epoch in range(found.get("epoch", 0), given.epochs):
    sampler.set_epoch(epoch)
    steps = len(training) // given.batches_per_sum
    batches = iter(training)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(epoch + step / steps)
        optimizer.zero_grad()
        for _ in range(given.batches_per_sum):
            images, labels = next(batches)
            (F.cross_entropy(model(images.to(device)), labels.to(device)) / given.batches_per_sum).backward()
        optimizer.step()
    accuracy = validate()
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: accuracy {accuracy:.3f}", flush=True)
    checkpoints.save((epoch + 1) * steps, epoch=epoch + 1, accuracy=accuracy)  # copies, and writes while training goes on

checkpoints.wait()  # the last one is on the disk, or an error says why not
weights = sum(parameter.detach().double().sum().item() for parameter in model.parameters())
print(f"rank {hvd.rank()} of {hvd.size()}: accuracy {accuracy:.3f}, sum of weights {weights:.9f}", flush=True)
