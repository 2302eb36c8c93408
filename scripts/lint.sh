#!/usr/bin/env bash
# All code quality gates, in parallel. Every gate runs, so that one run shows everything; the exit code says whether all passed.
# Usage: lint.sh FOLDER-OF-THE-TOOLS [analyze]
set -uo pipefail
bin=$1
PATH=$PWD/$bin:$PATH
work=$PWD/.work/lint
gates=()
failed=()
rm -rf "$work"
mkdir -p "$work/output"

# Starts a gate; `results` shows its output and whether it passed, in the order in which gates were started.
gate() {
    local number=${#gates[@]}
    gates+=("$1")
    shift
    { "$@" >"$work/output/$number" 2>&1 && touch "$work/output/$number.ok"; } &
}

results() {
    local number
    wait
    for number in "${!gates[@]}"; do
        if [ -e "$work/output/$number.ok" ]; then
            echo "ok      ${gates[number]}"
        else
            echo "FAILED  ${gates[number]}"
            cat "$work/output/$number"
            failed+=("${gates[number]}")
        fi
    done
    if [ ${#failed[@]} -gt 0 ]; then
        echo "lint failed: ${failed[*]}"
        exit 1
    fi
}

mapfile -t shell_files < <(git ls-files '*.sh' .ci/run 'images/files/bin/*' 'images/packages/*')
mapfile -t cpp_files < <(git ls-files 'collective_core/csrc/*.cpp' 'collective_core/csrc/*.h' 'benchmarks/*.c')
mapfile -t cpp_sources < <(git ls-files 'collective_core/csrc/*.cpp')
mapfile -t docker_files < <(git ls-files '*Dockerfile*')

# One process per core: the sources are the longest of all. What follows paths through the program takes ten times as long as all the
# rest: `make analyze`.
tidy() {
    printf '%s\0' "${cpp_sources[@]}" | xargs -0 -P "$(nproc)" -I SOURCE clang-tidy --quiet "--checks=$1" SOURCE -- \
        -std=c++17 -Icollective_core/csrc '-DCC_VERSION="lint"'
}

# ansible-lint checks what a user gets: the rendered playbook with its roles and modules.
playbooks() {
    provision plan tests/data/lint.ini --facts tests/data/lint-facts.json --driver auto --out "$work/playbook" || return
    cp playbooks/*.yml "$work/playbook/" && cp .ansible-lint "$work/playbook/" && cd "$work/playbook" || return
    ANSIBLE_LIBRARY=library ansible-lint --offline --profile production ./*.yml
}

# The collection's own roles; the others in it are those of the rendered playbook.
collection() {
    local folder=$work/collections/ansible_collections/provision/cluster
    python ansible/build.py --sources "$folder" || return
    cp .ansible-lint "$folder/" && cd "$folder" || return
    ANSIBLE_COLLECTIONS_PATH=$work/collections ansible-lint --offline --profile production roles/prepare \
        roles/{engine,nccl,openmpi}/{tasks/main.yml,tasks/install.yml,meta,defaults} roles/engine/tasks/shared_build.yml
}

if [ "${2:-}" = analyze ]; then
    gate "clang-tidy, with the static analyzer" tidy ""
    results
    exit
fi
gate "ansible-lint (production) of a rendered playbook" playbooks
gate "ansible-lint (production) of the collection" collection
gate "clang-tidy" tidy '-clang-analyzer-*'
# Two that write one new cache at a time can crash each other.
gate "mypy provision" mypy --cache-dir .mypy_cache/provision --strict provision
gate "mypy collective_core" mypy --cache-dir .mypy_cache/collective_core --config-file collective_core/pyproject.toml collective_core/src collective_core/horovod benchmarks/engine
gate "import-linter" env PYTHONPATH=collective_core/src lint-imports --no-cache
gate "workflows" check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
gate "issue forms" check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml
gate "ruff check" ruff check .
gate "ruff format" ruff format --check .
gate "shellcheck" shellcheck "${shell_files[@]}"
[ ${#docker_files[@]} -eq 0 ] || gate "hadolint" hadolint "${docker_files[@]}"
gate "includes of the engine" python scripts/check_includes.py collective_core/csrc
gate "clang-format" clang-format --dry-run -Werror "${cpp_files[@]}"
results
