"""tools/check_wgmma.py finds spills in listings of cuobjdump."""

import pytest

import check_wgmma

FORWARD_128 = "_ZN4sm9013ForwardKernelI13__nv_bfloat16Li128ELi128EEE"
FORWARD_256 = "_ZN4sm9013ForwardKernelI6__halfLi256ELi256EEE"


def listing(name, *instructions):
    """Returns a listing with instructions at 0x00, 0x10, 0x20 ..."""
    lines = [
        f"        /*{16 * i:04x}*/                   {text} ;"
        for i, text in enumerate(instructions)
    ]
    return "\n".join([f"\t\tFunction : {name}", *lines])


def two_loops(innermost="NOP", outer="NOP", rest="NOP"):
    """Returns instructions with a loop from 0x10 to 0x40 around one from 0x20 to 0x30."""
    return (
        rest,
        outer,
        "HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8]",
        f"{innermost}",
        "@P0 BRA 0x20",
        "@!P1 BRA 0x10",
        "EXIT",
    )


def faults(name, **places):
    return list(check_wgmma.faults_of(listing(name, *two_loops(**places))))


def test_loops_in_registers_pass():
    assert faults(FORWARD_128, rest="STL [R1], R2") == []
    assert list(check_wgmma.faults_of(listing(FORWARD_128, "STL [R1], R2", "EXIT"))) == []


def test_local_memory_in_innermost_product_loop_fails():
    for name in (FORWARD_128, FORWARD_256):
        (fault,) = faults(name, innermost="LDL.LU R2, [R1+0x8]")
        assert fault.startswith(name) and "1 accesses to local memory in innermost loops" in fault


@pytest.mark.parametrize(("name", "expected"), [(FORWARD_128, 1), (FORWARD_256, 0)])
def test_outer_loops_above_recorded_count_fail(name, expected):
    loop_faults = faults(name, outer="@P2 STL.64 [R1], R2")
    assert len(loop_faults) == expected
    assert all("loops around those" in fault for fault in loop_faults)


def test_producers_above_recorded_number_fail():
    most = check_wgmma.ALLOWED["Forward", 128, 128].rest
    for number, expected in ((most, 0), (most + 1, 1)):
        body = two_loops() + ("LDL R2, [R1]",) * number
        assert len(list(check_wgmma.faults_of(listing(FORWARD_128, *body)))) == expected


def test_unrecorded_kernel_with_a_spill_is_a_fault():
    body = two_loops(rest="STL [R1], R2")
    assert len(list(check_wgmma.faults_of(listing("another", *body)))) == 1
