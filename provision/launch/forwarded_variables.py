"""The variables of this shell that ranks get without `-x`: of the engine, of Horovod, and of the libraries under a training job. Pure.

horovodrun passes all on; a shell's PATH, HOME and secrets have no business on other hosts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

CHOICES = KNOWN, ALL, NONE = "known", "all", "none"
_PREFIXES = (
    *("COLLECTIVE_", "HOROVOD_", "NCCL_", "GLOO_", "OMP_", "KMP_", "MKL_", "MALLOC_", "GLIBC_"),
    *("HIP_", "ROCR_", "RCCL_", "MIOPEN_", "CUDA_", "CUDNN_", "CUBLAS_", "TORCH", "PYTORCH_", "PYTHON"),
)
#: Passed only by name: the value may be a secret.
_SECRET = re.compile(
    r"SECRET|TOKEN(?!IZERS)|PASS(?!IVE)|PWD|CREDENTIAL|PRIVATE|AUTH|COOKIE|API_?KEY|ACCESS_?KEY|_KEY$|_PAT$|DSN$|CONN(ECTION)?_?STR",
    re.IGNORECASE,
)
#: A URL with a password in it.
_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]*@")
#: Valid on this machine or in this process only.
_LOCAL = re.compile(
    r"(COLLECTIVE|HOROVOD)_(RANK|SIZE|STORE|PORT|ADDRESS|HOST_ID|HOSTNAME|ELASTIC|WORKER|(LOCAL|CROSS)_(RANK|SIZE)|GLOO_RENDEZVOUS_\w+)"
    r"|PYTHON(HOME|EXECUTABLE|STARTUP|USERBASE|INSPECT|BREAKPOINT)|TORCHELASTIC_\w+|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
    r"|(OMPI|PMIX|PMI|PRTE|SLURM|SSH|XDG|DBUS|LC|CONDA|DOCKER|KUBERNETES|PROVISION)_\w+|K_MPI_JOB_ROLE|VIRTUAL_ENV(_PROMPT)?"
    r"|(CUDA|HIP|ROCR)_(VISIBLE_DEVICES|HOME|PATH)|PATH|LD_\w+|HOME|USER|LOGNAME|USERNAME|SHELL|SHLVL|PWD|OLDPWD|HOSTNAME|MAIL|TERM|COLORTERM|DISPLAY|WAYLAND_DISPLAY|TMPDIR|TEMP|TMP"
    r"|LANG|LANGUAGE|LS_COLORS|EDITOR|PAGER|BASH_\w+|_|COLUMNS|LINES|PS\d|PROMPT_COMMAND"
)


def select(environment: Mapping[str, str], which: str) -> dict[str, str]:
    """The variables that ranks get: ``known``, ``all`` that are not for this machine only, or ``none``; none that look secret."""
    return {
        name: value
        for name, value in environment.items()
        if which != NONE
        and (which == ALL or name.startswith(_PREFIXES))
        and re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
        and not _LOCAL.fullmatch(name)
        and not _SECRET.search(name)
        and not _WITH_PASSWORD.search(value)
    }
