"""MNIST's network trained as a Horovod script does, on images that the script makes itself.

python -m collective_core.launch -np 2 python examples/pytorch_mnist.py
"""

import argparse

import collective_core.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images):
        x = F.relu(F.max_pool2d(self.conv1(images), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def make_images(count, seed):
    """Ten patterns stand for the ten digits: each image is one of them, with noise. Replace this by your own data set."""
    patterns = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    return TensorDataset(patterns[labels] + torch.randn(count, 1, 28, 28, generator=generator), labels)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=32, help="per rank")
parser.add_argument("--lr", type=float, default=0.03, help="per rank")
given = parser.parse_args()

hvd.init()
# Each rank has a GPU, if there are any.
device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(hvd.rank())  # ranks start from different weights: the broadcast below makes them equal

# Each rank trains on its own part of the data.
train_set, test_set = make_images(2048, seed=1), make_images(512, seed=2)
sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train_set, batch_size=given.batch_size, sampler=sampler)

model = Net().to(device)
# A step sees `size` times as many images as on one rank, so the learning rate may be larger.
optimizer = torch.optim.SGD(model.parameters(), lr=given.lr * hvd.size(), momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(given.epochs):
    sampler.set_epoch(epoch)  # another order in each epoch
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()  # sums each gradient over the ranks as soon as it is there
        optimizer.step()  # waits for the sums
    mean_loss = hvd.allreduce(loss.detach(), name="loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {mean_loss:.3f}", flush=True)

# Each rank tests on a part, and the average over all ranks is the result.
images, labels = test_set[hvd.rank() :: hvd.size()]
with torch.no_grad():
    accuracy = hvd.allreduce((model(images.to(device)).argmax(1) == labels.to(device)).float().mean(), name="accuracy")
weights = sum(parameter.detach().double().sum().item() for parameter in model.parameters())
print(f"rank {hvd.rank()} of {hvd.size()}: accuracy {accuracy:.3f}, sum of weights {weights:.9f}", flush=True)
