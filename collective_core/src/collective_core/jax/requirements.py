"""What must be installed for JAX. Imported first, so that what is missing is said at once."""

from __future__ import annotations

try:
    import jax
except ImportError as error:
    raise ImportError(f"collective_core.jax needs JAX 0.6.2 or newer: pip install 'jax>=0.6.2' ({error})") from error
try:
    from jax.experimental import buffer_callback as buffer_callback
except ImportError as error:
    raise ImportError(
        f"collective_core.jax needs JAX 0.6.2 or newer, and JAX {jax.__version__} is installed: pip install -U jax"
    ) from error
