"""The generated stubs belong to the protocol that lies beside them."""

import pathlib
import subprocess
import sys

import pytest
from google.protobuf import descriptor_pb2

from serving.api.v1 import decoder_pb2
from serving.client import CacheStats, ModelInfo, Sampling

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = "serving/api/v1"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A folder with what protoc makes of the protocol now."""
    out = tmp_path_factory.mktemp("stubs")
    flags = [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *flags,
         f"--descriptor_set_out={out}/set", f"{FOLDER}/decoder.proto"],
        cwd=ROOT, check=True, timeout=60,
    )
    return out


def test_messages_are_those_of_the_protocol(fresh):
    (file,) = descriptor_pb2.FileDescriptorSet.FromString((fresh / "set").read_bytes()).file
    file.ClearField("source_code_info")
    for message in file.message_type:
        for field in message.field:
            field.ClearField("json_name")
    ours = descriptor_pb2.FileDescriptorProto()
    decoder_pb2.DESCRIPTOR.CopyToProto(ours)
    assert ours == file


@pytest.mark.parametrize("name", ["decoder_pb2.pyi", "decoder_pb2_grpc.py"])
def test_stubs_are_those_of_the_protocol(fresh, name):
    def lines(path: pathlib.Path) -> list[str]:
        # The generator's version, which need not be the one that made them.
        return [line for line in path.read_text().splitlines() if not line.startswith("GRPC_GENERATED_VERSION")]

    assert lines(ROOT / FOLDER / name) == lines(fresh / FOLDER / name)


@pytest.mark.parametrize("ours, message", [
    (Sampling, decoder_pb2.Sampling), (CacheStats, decoder_pb2.CacheStats), (ModelInfo, decoder_pb2.ModelInfo)
])
def test_client_knows_every_field(ours, message):
    assert set(ours.__dataclass_fields__) == set(message.DESCRIPTOR.fields_by_name)


def test_sampling_has_the_fields_of_k3jax():
    from k3jax import SamplingParams

    assert set(Sampling.__dataclass_fields__) == set(SamplingParams.__dataclass_fields__)


def test_importing_the_client_does_not_import_jax():
    code = "import sys, serving.client.command; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=60) == "False\n"
