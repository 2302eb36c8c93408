"""A training script as Horovod's users write them: pictures in batches, a schedule, an evaluation, a rank with less data."""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import torch.utils.data.distributed
from horovod.common.process_sets import ProcessSet
from horovod.common.util import gloo_built, mpi_built, split_list
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import rank, size


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, kernel_size=3)
        self.bn = hvd.SyncBatchNorm(4)
        self.fc = torch.nn.Linear(4 * 9, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return F.log_softmax(self.fc(x.flatten(1)), dim=1)


def metric_average(val, name):
    return hvd.allreduce(torch.tensor(val), name=name).item()


hvd.init(process_sets=[ProcessSet([0])])
assert (rank(), size()) == (hvd.rank(), hvd.size())
assert mpi_built(verbose=True) == hvd.mpi_built()
assert gloo_built() == hvd.gloo_built()
assert split_list(list(range(5)), 2) == [[0, 1, 2], [3, 4]]
torch.manual_seed(42)
# Four classes of pictures: a bright corner each.
labels = torch.arange(256) % 4
images = torch.rand(256, 1, 8, 8) * 0.3
for number, label in enumerate(labels.tolist()):
    y, x = 4 * (label // 2), 4 * (label % 2)
    images[number, 0, y : y + 4, x : x + 4] += 1.0
dataset = torch.utils.data.TensorDataset(images, labels)
sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(dataset, batch_size=16, sampler=sampler)

torch.manual_seed(hvd.rank())  # replicas that differ before the broadcast
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=Compression.none, op=hvd.Average, gradient_predivide_factor=1.0
)
for epoch in range(4):
    model.train()
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        F.nll_loss(model(data), target).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        with optimizer.skip_synchronize():
            optimizer.step()
model.eval()
accuracy = metric_average((model(images).argmax(1) == labels).float().mean().item(), "avg_accuracy")
same = hvd.allgather_object([p.tolist() for p in model.parameters()])
assert all(parameters == same[0] for parameters in same)
if hvd.rank() > 0:
    # Horovod divides by all ranks, also when one has joined.
    assert hvd.allreduce(torch.ones(3), name="without rank 0").tolist() == [(hvd.size() - 1) / hvd.size()] * 3
hvd.join()
handle = hvd.allreduce_async(torch.ones(100_000), name="twice")
try:
    hvd.allreduce_async(torch.ones(100_000), name="twice")
    refused = hvd.poll(handle)  # the first one had ended
except ValueError:
    refused = True
assert refused
hvd.synchronize(handle)
print(f"rank {hvd.rank()} of {hvd.size()} accuracy {accuracy:.2f}", flush=True)
hvd.shutdown()
