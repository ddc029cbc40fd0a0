#!/usr/bin/env bash
# Make the environments of tests with mark `peers`: one per project, under $PLUMBLINE_PEERS.
#   PLUMBLINE_PEERS=~/peers tests/delivery/peers.sh [llamafactory swift verl openrlhf ggml peft011 peft015]
# Each holds a trainer and the packages that it wants in another version than this project; the rest
# (torch among them) comes from .venv, which stays as it is.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${PLUMBLINE_PEERS:?names the folder of the environments}"
SITE=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

PLOTS="matplotlib contourpy cycler kiwisolver fonttools pyparsing"
declare -A PACKAGES=(
    [llamafactory]="llamafactory==0.9.5 transformers==5.6.0 tokenizers==0.22.2 peft==0.18.1 trl==0.24.0
        huggingface-hub<2 datasets==4.0.0 fsspec==2025.3.0 multiprocess dill==0.3.8 tyro==0.8.14 shtab fire
        termcolor docstring-parser einops scipy sentencepiece tiktoken omegaconf hf-transfer
        sse-starlette av $PLOTS"
    [swift]="ms-swift==4.6.0 peft==0.20.0 trl<1 datasets==4.8.4 addict binpacking dacite einops json-repair
        modelscope modelscope-hub nltk oss2 rouge simplejson tiktoken sentencepiece openai jiter distro
        scipy zstandard attrdict cpm-kernels $PLOTS"
    [verl]="verl==0.9.1 transformers==5.10.4 tokenizers==0.22.2 huggingface-hub<2 codetiming
        tensordict==0.10.0 pyvers torchdata pylatexenc ray msgpack jsonschema"
    [openrlhf]="openrlhf==0.11.2 optree torchmetrics lightning-utilities loralib isort jsonlines pylatexenc
        einops torchdata"
    [transformers4]="transformers==4.57.6 tokenizers==0.22.2 huggingface-hub<1 peft==0.17.1 datasets==4.0.0
        fsspec==2025.3.0 multiprocess dill==0.3.8"
    [transformers440]="transformers==4.40.2 tokenizers==0.19.1 huggingface-hub<1 peft==0.10.0
        accelerate==0.30.1 datasets==2.21.0 fsspec==2024.6.1 multiprocess==0.70.16 dill==0.3.8"
    [peft011]="peft==0.11.1 transformers==4.40.2 tokenizers==0.19.1 huggingface-hub<1 accelerate==0.30.1"
    [peft015]="peft==0.15.2 transformers==4.57.6 tokenizers==0.22.2 huggingface-hub<1"
    [ggml]="scikit-build-core pathspec"
)

stub() { # stub ENVIRONMENT FILE TEXT: a module that has no CPU build, and that text alone never calls
    local file
    file=$("$PLUMBLINE_PEERS/$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/$2
    mkdir -p "$(dirname "$file")"
    echo "$3" >"$file"
}

build_llama_cpp() { # build_llama_cpp FOLDER: from the sources in the package of its Python binding
    .venv/bin/python -m pip download -q --no-deps --no-binary :all: -d "$1" llama-cpp-python==0.3.36
    tar -xzf "$1"/llama_cpp_python-*.tar.gz -C "$1" --strip-components=2 --wildcards '*/vendor/llama.cpp/*'
    cmake -S "$1/llama.cpp" -B "$1/llama.cpp/build" -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF
    cmake --build "$1/llama.cpp/build" -j "$(nproc)" --target llama-quantize llama-server
}

for name in "${@:-llamafactory swift verl openrlhf}"; do for peer in $name; do
    echo "peers: $peer"
    .venv/bin/python -m venv --without-pip "$PLUMBLINE_PEERS/$peer"
    stub "$peer" plumbline.pth "$SITE"
    read -r -d '' -a wanted <<<"${PACKAGES[$peer]}" || true
    .venv/bin/python -m pip --python "$PLUMBLINE_PEERS/$peer/bin/python" install -q --no-deps "${wanted[@]}"
    case $peer in
    ggml) build_llama_cpp "$PLUMBLINE_PEERS/ggml" ;;
    llamafactory) stub "$peer" torchaudio.py '"""Stub: audio alone needs it."""' ;;
    openrlhf)
        stub "$peer" flash_attn/__init__.py '"""Stub: packed samples alone need it."""'
        stub "$peer" flash_attn/bert_padding.py 'index_first_axis = pad_input = rearrange = unpad_input = None'
        stub "$peer" flash_attn/utils/__init__.py ''
        stub "$peer" flash_attn/utils/distributed.py 'all_gather = None'
        ;;
    esac
done; done
