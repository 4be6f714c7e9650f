"""Small files in the published formats, and a server for them on this machine."""

import gzip
import hashlib
import io
import struct
import tarfile
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest
import torch

from ortholand_lab.datasets import cifar10, mnist, search
from ortholand_lab.datasets.base import KnownFile
from ortholand_lab.datasets.download import RemoteFile


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path) -> Path:
    """No test finds the data of whoever runs it, nor leaves anything in the cache."""
    monkeypatch.delenv("ORTHOLAND_DATA", raising=False)
    monkeypatch.delenv("ORTHOLAND_OFFLINE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ortholand"


@dataclass
class Files:
    """Files of a data set, what is in them, and how to put them somewhere."""

    contents: dict[str, bytes]  # by name, not compressed
    images: dict[str, torch.Tensor]
    labels: dict[str, torch.Tensor]

    def write(self, folder: Path, *, compress: bool = False, only: str = "") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.contents.items():
            if only in name:
                path = folder / (f"{name}.gz" if compress else name)
                path.write_bytes(gzip.compress(content, mtime=0) if compress else content)
        return folder

    def known(self) -> tuple[KnownFile, ...]:
        return tuple(KnownFile(n, len(c), sha256(c)) for n, c in self.contents.items())


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def remote(served: Mapping[str, bytes], members: tuple[str, ...] = ()) -> tuple[RemoteFile, ...]:
    return tuple(RemoteFile(n, len(c), sha256(c), members) for n, c in served.items())


@pytest.fixture
def mnist_files(monkeypatch) -> Files:
    """A tiny MNIST, which is taken for the published one."""
    random = torch.Generator().manual_seed(0)
    files = Files({}, {}, {})
    for part, n in (("train", 12), ("t10k", 5)):
        images = torch.randint(256, (n, 28, 28), dtype=torch.uint8, generator=random)
        labels = torch.randint(10, (n,), dtype=torch.uint8, generator=random)
        header = struct.pack(">4I", 0x803, n, 28, 28)
        files.contents[f"{part}-images-idx3-ubyte"] = header + images.numpy().tobytes()
        header = struct.pack(">2I", 0x801, n)
        files.contents[f"{part}-labels-idx1-ubyte"] = header + labels.numpy().tobytes()
        files.images[part], files.labels[part] = images, labels
    monkeypatch.setattr(mnist, "FILES", files.known())
    return files


@pytest.fixture
def cifar_files(monkeypatch) -> Files:
    """A tiny CIFAR-10, four images a file, which is taken for the published one."""
    random = torch.Generator().manual_seed(1)
    files = Files({}, {}, {})
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8, generator=random)
        labels = torch.randint(10, (4,), dtype=torch.uint8, generator=random)
        files.contents[name] = b"".join(
            bytes([int(label)]) + image.numpy().tobytes()
            for image, label in zip(images, labels, strict=True)
        )
        files.images[name], files.labels[name] = images, labels
    *train, test = files.known()
    monkeypatch.setattr(cifar10, "TRAIN_FILES", tuple(train))
    monkeypatch.setattr(cifar10, "TEST_FILE", test)
    return files


@dataclass
class Server:
    """Serves bytes by name, well or badly; remembers what it was asked for."""

    url: str
    served: dict[str, bytes] = field(default_factory=dict)
    promised: dict[str, int] = field(default_factory=dict)  # length told, if not the true one
    asked: list[str] = field(default_factory=list)
    stalled: dict[str, Event] = field(default_factory=dict)

    def stall(self, name: str) -> Callable[[], None]:
        """Send nothing of a file, until what is returned is called."""
        self.stalled[name] = Event()
        return self.stalled[name].set


@pytest.fixture
def server() -> Generator[Server, None, None]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(b"")

        def do_GET(self):
            state.asked.append(self.name)
            if self.name in state.stalled:
                state.stalled[self.name].wait(10)
                return
            self.answer(state.served.get(self.name, b""))

        @property
        def name(self):
            return self.path.rsplit("/", 1)[-1]

        def answer(self, body):
            if self.name not in state.served:
                self.send_error(404)
                return
            length = state.promised.get(self.name, len(state.served[self.name]))
            self.send_response(200)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        state = Server(f"http://127.0.0.1:{httpd.server_address[1]}/data/")
        thread = Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        httpd.shutdown()
        thread.join()


def archive(contents: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def mnist_mirror(monkeypatch, server, mnist_files) -> Server:
    """The server has MNIST, and is where it is downloaded from."""
    compressed = {f"{n}.gz": gzip.compress(c, mtime=0) for n, c in mnist_files.contents.items()}
    server.served.update(compressed)
    changed = replace(search.DATASETS["mnist"], mirrors=(server.url,), remote=remote(compressed))
    monkeypatch.setitem(search.DATASETS, "mnist", changed)
    return server


@pytest.fixture
def cifar_mirror(monkeypatch, server, cifar_files) -> Server:
    """The server has CIFAR-10, with more in the archive than is wanted."""
    names = tuple(f"cifar-10-batches-bin/{name}" for name in cifar_files.contents)
    members = dict(zip(names, cifar_files.contents.values(), strict=True))
    unwanted = {"cifar-10-batches-bin/readme.html": b"?", "../evil": b"!", "/tmp/evil": b"!"}
    packed = {"cifar-10-binary.tar.gz": archive({**unwanted, **members})}
    server.served.update(packed)
    changed = replace(
        search.DATASETS["cifar10"], mirrors=(server.url,), remote=remote(packed, names)
    )
    monkeypatch.setitem(search.DATASETS, "cifar10", changed)
    return server
