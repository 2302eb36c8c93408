#!/usr/bin/env bash
# All code quality gates. Every one runs, so that one look shows everything; the exit code says whether all passed.
set -uo pipefail
bin=$1
PATH=$PWD/$bin:$PATH
work=$PWD/.work/lint
failed=()

gate() {
    local name=$1
    shift
    if output=$("$@" 2>&1); then
        echo "ok      $name"
    else
        echo "FAILED  $name"
        echo "$output"
        failed+=("$name")
    fi
}

mapfile -t shell_files < <(git ls-files '*.sh' .ci/run 'images/files/bin/*' 'images/packages/*')
mapfile -t cpp_files < <(git ls-files 'collective_core/csrc/*.cpp' 'collective_core/csrc/*.h')
mapfile -t cpp_sources < <(git ls-files 'collective_core/csrc/*.cpp')
mapfile -t docker_files < <(git ls-files '*Dockerfile*')

gate "ruff check" ruff check .
gate "ruff format" ruff format --check .
gate "mypy provision" mypy --strict provision
gate "mypy collective_core" mypy --config-file collective_core/pyproject.toml collective_core/src collective_core/horovod
gate "import-linter" lint-imports --no-cache
gate "shellcheck" shellcheck "${shell_files[@]}"
[ ${#docker_files[@]} -eq 0 ] || gate "hadolint" hadolint "${docker_files[@]}"
gate "clang-format" clang-format --dry-run -Werror "${cpp_files[@]}"
gate "clang-tidy" clang-tidy --quiet "${cpp_sources[@]}" -- -std=c++17 -Icollective_core/csrc '-DCC_VERSION="lint"'

# Ansible's linter looks at what a user gets: the rendered playbook with its roles and modules.
rm -rf "$work"
mkdir -p "$work"
render() { provision plan tests/data/lint.ini --facts tests/data/lint-facts.json --out "$work/playbook"; }
gate "render a playbook" render
cp playbooks/*.yml "$work/playbook/" && cp .ansible-lint "$work/playbook/"
actions=$PWD/playbooks/action_plugins
lint_playbooks() (cd "$work/playbook" && ANSIBLE_LIBRARY=library ANSIBLE_ACTION_PLUGINS="$actions" ansible-lint --offline --profile production ./*.yml)
gate "ansible-lint (production)" lint_playbooks

if [ ${#failed[@]} -gt 0 ]; then
    echo "lint failed: ${failed[*]}"
    exit 1
fi
