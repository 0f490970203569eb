"""Ceph on one node behind its S3 gateway: a monitor, a store of objects on a file, the gateway.

Debian's packages are unpacked into a cache, not installed, so that nobody need be root.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import uuid
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .s3_clients import RawBucket, client_of, options_for
from .server import CACHE, Missing, Server, free_port, leashed, scratch, wait_for

_PACKAGES = ("radosgw", "ceph-mon", "ceph-osd", "ceph-common")
_ROOT = CACHE / "ceph"
PROGRAM = _ROOT / "usr/bin/radosgw"
_LIBRARIES = Path(f"usr/lib/{platform.machine()}-linux-gnu")
_BUCKET = "dtckpt-tests"
_KEY, _SECRET = "testkey", "testsecret"

_SETTINGS = """\
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon_port}
mon initial members = a
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
ms mon service mode = crc
ms mon cluster mode = crc
public addr = 127.0.0.1
cluster addr = 127.0.0.1
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail warn = 1
mon data avail crit = 1
osd objectstore = bluestore
bluestore block size = 8589934592
bluestore block create = true
osd memory target = 939524096
erasure code dir = {root}/{libraries}/ceph/erasure-code
osd class dir = {root}/{libraries}/rados-classes
plugin dir = {root}/{libraries}/ceph
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
run dir = {folder}/run
admin socket = {folder}/run/$name.asok
pid file = {folder}/run/$name.pid
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
rgw frontends = beast endpoint=127.0.0.1:{port}
"""


def install() -> None:
    """Unpack the packages and what they need that is not there; Missing if apt does not."""
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise Missing(f"this system has no {tool}")
    unpacked = _ROOT.with_suffix(".new")
    shutil.rmtree(unpacked, ignore_errors=True)
    with scratch("debs") as folder:
        plan = ["apt-get", "install", "--simulate", "--no-install-recommends", *_PACKAGES]
        lines = _output(plan, folder).splitlines()
        names = [line.split()[1] for line in lines if line.startswith("Inst ")]
        # Those that are installed here are not in the plan, but needed for their programs.
        _output(["apt-get", "download", *sorted({*names, *_PACKAGES})], folder)
        for package in folder.glob("*.deb"):
            _output(["dpkg", "-x", str(package), str(unpacked)], folder)
    unpacked.rename(_ROOT)


def _output(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"{' '.join(command)[:60]}: {done.stderr.strip()[-300:]}")
    return done.stdout


def _variables() -> dict[str, str]:
    """Return what programs need that were not installed where they expect to be."""
    places = ("lib" / _LIBRARIES.relative_to("usr/lib"), _LIBRARIES, _LIBRARIES / "ceph")
    return {
        "PATH": f"{_ROOT}/usr/bin:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": ":".join(str(_ROOT / place) for place in places),
        "PYTHONPATH": f"{_ROOT}/usr/lib/python3/dist-packages",
    }


@contextmanager
def ceph() -> Generator[Server]:
    """Serve from three processes during the block; they are ready after some 15 seconds."""
    with scratch("ceph") as folder, ExitStack() as stack:
        port, mon_port, fsid = free_port(), free_port(), str(uuid.uuid4())
        for name in ("mon", "osd", "run", "rgw"):
            (folder / name).mkdir()
        settings = folder / "ceph.conf"
        settings.write_text(
            _SETTINGS.format(
                fsid=fsid,
                mon_port=mon_port,
                port=port,
                folder=folder,
                root=_ROOT,
                libraries=_LIBRARIES,
            )
        )
        variables = _variables() | {"CEPH_CONF": str(settings)}

        def run(*command: str) -> None:
            done = subprocess.run(
                command,
                env=os.environ | variables,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=60,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}: {done.stdout[-500:]}")

        def begin(*command: str) -> subprocess.Popen[bytes]:
            return stack.enter_context(leashed(command, folder, variables))

        members = str(folder / "monmap")
        address = f"[v2:127.0.0.1:{mon_port}]"
        run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, members)
        run("ceph-mon", "--mkfs", "-i", "a", "--monmap", members)
        wait_for(mon_port, begin("ceph-mon", "-f", "-i", "a"), folder)
        osd = str(uuid.uuid4())
        run("/usr/bin/python3", f"{_ROOT}/usr/bin/ceph", "osd", "new", osd)
        run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        add = ("osd", "crush", "add", "osd.0", "1.0", "host=localhost", "root=default")
        run("/usr/bin/python3", f"{_ROOT}/usr/bin/ceph", *add)
        begin("ceph-osd", "-f", "-i", "0")
        gateway = begin("radosgw", "-f", "-n", "client.rgw.a")
        user = ("--uid=test", "--display-name=test", f"--access-key={_KEY}", f"--secret={_SECRET}")
        run("radosgw-admin", "user", "create", *user)
        wait_for(port, gateway, folder)
        options = options_for(f"http://127.0.0.1:{port}", _KEY, _SECRET)
        client = client_of(options)
        client.create_bucket(Bucket=_BUCKET)
        yield Server(
            name="ceph",
            url=f"s3://{_BUCKET}",
            storage_options=options,
            raw=lambda prefix: RawBucket(client, _BUCKET, prefix),
        )
