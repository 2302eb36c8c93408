"""The sampler of an elastic job."""

from collective_core.torch.elastic.sampler import ElasticSampler as ElasticSampler
