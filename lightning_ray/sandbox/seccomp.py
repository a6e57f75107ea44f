"""The system calls that a sandboxed process may not make, as a BPF program for bubblewrap and as a profile for
containers.

Everything that ordinary programs use is allowed. Refused are calls that make or join namespaces (so no nested user
namespace), mount, load code into the kernel, look into other processes, or widen the kernel's attack surface
(io_uring, bpf, perf, keys, userfaultfd), and sockets of any family but Unix, IPv4, IPv6 and netlink: AF_VSOCK and
the like are not stopped by a network namespace. `clone3` answers ENOSYS, since its flags lie in memory that a filter
cannot read; the C library then falls back to `clone`, whose flags are checked.
"""

import errno
import functools
import os
import tempfile
from typing import Any

from lightning_ray.sandbox.base import SandboxUnavailable

REFUSED = (
    "acct", "add_key", "bpf", "chroot", "clock_adjtime", "clock_settime", "create_module", "delete_module",
    "fanotify_init", "finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "init_module", "io_uring_enter",
    "io_uring_register", "io_uring_setup", "ioperm", "iopl", "kcmp", "kexec_file_load", "kexec_load", "keyctl",
    "lookup_dcookie", "mount", "mount_setattr", "move_mount", "name_to_handle_at", "nfsservctl",
    "open_by_handle_at", "open_tree", "perf_event_open", "personality", "pidfd_getfd", "pivot_root",
    "process_madvise", "process_vm_readv", "process_vm_writev", "ptrace", "quotactl", "quotactl_fd", "reboot",
    "request_key", "setdomainname", "sethostname", "setns", "settimeofday", "swapoff", "swapon", "syslog", "umount",
    "umount2", "unshare", "uselib", "userfaultfd", "vhangup",
)  # fmt: skip
"""Answered with EPERM."""

FAMILIES = (1, 2, 10, 16)
"""Allowed socket families: AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""

NAMESPACE_FLAGS = (0x00000080, 0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
"""CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""

TERMINAL_INJECTION = (0x5412, 0x541C)
"""ioctl requests TIOCSTI and TIOCLINUX: they type into a terminal."""
COMPARE = "SCMP_CMP_"


@functools.cache
def program() -> bytes:
    """`profile` as classic BPF, compiled once per process. `SandboxUnavailable` where libseccomp is missing."""
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise SandboxUnavailable(
            f"the system call filter cannot be built: {error}. Install libseccomp "
            "(Debian: apt-get install libseccomp2) and the Python package pyseccomp"
        ) from error
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for rule in profile()["syscalls"]:
        arguments = [pyseccomp.Arg(each["index"], getattr(pyseccomp, each["op"].removeprefix(COMPARE)), each["value"],
                                   each["valueTwo"]) for each in rule.get("args", ())]
        for name in rule["names"]:
            try:
                rules.add_rule(pyseccomp.ERRNO(rule["errnoRet"]), name, *arguments)
            except (OSError, ValueError):
                if _exists_here(pyseccomp, name):
                    raise
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def profile() -> dict[str, Any]:
    """The filter in the format of Docker's and Podman's seccomp profiles."""
    highest = max(FAMILIES)

    def refuse(names: list[str], code: int, *arguments: tuple[int, str, int, int]) -> dict[str, Any]:
        rule: dict[str, Any] = {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": code}
        if arguments:
            rule["args"] = [{"index": index, "op": f"{COMPARE}{compare}", "value": value, "valueTwo": second}
                            for index, compare, value, second in arguments]
        return rule

    rules = [refuse(list(REFUSED), errno.EPERM), refuse(["clone3"], errno.ENOSYS)]
    rules += [refuse(["clone"], errno.EPERM, (0, "MASKED_EQ", flag, flag)) for flag in NAMESPACE_FLAGS]
    rules += [refuse(["socket"], errno.EAFNOSUPPORT, (0, "EQ", family, 0))
              for family in sorted(set(range(highest)) - set(FAMILIES))]
    rules.append(refuse(["socket"], errno.EAFNOSUPPORT, (0, "GT", highest, 0)))
    rules += [refuse(["ioctl"], errno.EPERM, (1, "MASKED_EQ", 0xFFFFFFFF, request)) for request in TERMINAL_INJECTION]
    return {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules}


def _exists_here(pyseccomp: object, name: str) -> bool:
    """Whether this architecture has a system call of that name (negative numbers are libseccomp's placeholders)."""
    try:
        return pyseccomp.resolve_syscall(pyseccomp.system_arch(), name) >= 0  # type: ignore[attr-defined]
    except (OSError, ValueError):
        return False


@functools.cache
def _sealed() -> int:
    descriptor = os.memfd_create("seccomp")
    os.write(descriptor, program())
    return descriptor


def open_program() -> int:
    """A new file descriptor at the start of the program, for bubblewrap's `--seccomp`. The caller closes it."""
    return os.open(f"/proc/self/fd/{_sealed()}", os.O_RDONLY | os.O_CLOEXEC)
