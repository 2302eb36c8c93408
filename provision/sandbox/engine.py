"""What runs the hosts of a sandbox. All that it makes has the sandbox's name, by which alone it is found and removed."""

from provision.sandbox.docker_engine import DockerEngine
from provision.sandbox.namespaces import NamespaceEngine

Engine = DockerEngine | NamespaceEngine
