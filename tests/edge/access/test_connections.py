"""Limits on the number of connections, in all and for each address."""

import resource
import subprocess
import sys

from tailrace.edge.access.connections import ConnectionLimits


def test_connections_are_bounded_in_all_and_by_address() -> None:
    limits = ConnectionLimits(most=4, most_per_address=2, exempt=lambda a: a == "127.0.0.1")
    assert [limits.admit("192.0.2.1") for _ in range(3)] == [True, True, False]
    assert [limits.admit("::ffff:192.0.2.1"), limits.admit("127.0.0.1")] == [False, True]
    assert limits.admit("127.0.0.1")
    assert not limits.admit("192.0.2.2")  # four in all
    limits.release("192.0.2.1")
    assert limits.count == 3
    assert limits.admit("192.0.2.1")


def test_a_site_of_ipv6_is_one_client() -> None:
    limits = ConnectionLimits(most=10, most_per_address=1)
    assert limits.admit("2001:db8:0:1::1")
    assert not limits.admit("2001:db8:0:1:ffff::2")
    assert limits.admit("2001:db8:0:2::1")
    limits.release("2001:db8:0:1::1")
    assert limits.admit("2001:db8:0:1:ffff::2")


def test_as_many_files_may_be_open_as_the_hard_limit_lets() -> None:
    """In a process of its own, whose soft limit is low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = (
        "import resource\n"
        "from tailrace.edge.access.connections import raise_open_files\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))\n"
        "print(raise_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told, soft = map(int, done.stdout.split())
    assert (soft == hard) and (told == hard or hard == resource.RLIM_INFINITY)
