"""A graph of TensorFlow 1 with a session and hooks, as it runs in TensorFlow 2, on data that the script makes itself.

python -m collective_core.launch -np 2 python examples/tensorflow1_session.py
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no remarks about the processor

import collective_core.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=32, help="per rank")
parser.add_argument("--lr", type=float, default=0.05, help="per rank")
given = parser.parse_args()

tf.disable_v2_behavior()
hvd.init()


def make_images(count, seed):
    """Ten patterns stand for the ten digits: each image is one of them, with noise. Replace this by your own data set."""
    patterns = np.random.default_rng(0).standard_normal((10, 784), np.float32)
    generator = np.random.default_rng(seed)
    labels = generator.integers(10, size=count)
    return patterns[labels] + 2 * generator.standard_normal((count, 784), np.float32), labels


images, labels = tf.placeholder(tf.float32, [None, 784]), tf.placeholder(tf.int64, [None])
tf.set_random_seed(hvd.rank())  # ranks start from different weights: the hook below makes them equal
hidden_weights = tf.get_variable("hidden_weights", [784, 50])
output_weights = tf.get_variable("output_weights", [50, 10])
logits = tf.nn.relu(images @ hidden_weights) @ output_weights
loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
accuracy = hvd.allreduce(tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32)))

# A step sees `size` times as many images as on one rank, so the learning rate may be larger.
optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(given.lr * hvd.size()))
steps = tf.train.get_or_create_global_step()
train = optimizer.minimize(loss, global_step=steps)

hooks = [hvd.BroadcastGlobalVariablesHook(root_rank=0), tf.train.StopAtStepHook(last_step=given.steps)]
if hvd.rank() == 0:
    hooks.append(tf.train.LoggingTensorHook({"step": steps, "loss": loss}, every_n_iter=50))

# Each rank trains on its own part of the data.
own_images, own_labels = (part[hvd.rank() :: hvd.size()] for part in make_images(2048, seed=1))
test_images, test_labels = (part[hvd.rank() :: hvd.size()] for part in make_images(512, seed=2))
order = np.random.default_rng(hvd.rank())
with tf.train.SingularMonitoredSession(hooks=hooks) as session:
    while not session.should_stop():
        chosen = order.integers(len(own_labels), size=given.batch_size)
        session.run(train, {images: own_images[chosen], labels: own_labels[chosen]})
    # Each rank tests on a part, and the average over all ranks is the result. Past the hooks, which have stopped the training.
    plain = session.raw_session()
    result = plain.run(accuracy, {images: test_images, labels: test_labels})
    weights = plain.run([hidden_weights, output_weights])
total = sum(float(value.sum(dtype=np.float64)) for value in weights)
print(f"rank {hvd.rank()} of {hvd.size()}: accuracy {result:.3f}, sum of weights {total:.9f}", flush=True)
