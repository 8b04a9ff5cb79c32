"""An operand that machine code never made is found, whatever way the code goes, and no other."""

from __future__ import annotations

import sys

import pytest
import workspace

# By its file: the testkit as a package would import torch.
sys.path.append(str(workspace.kit().import_folder))

import machine_code

# A loop of products; the second descriptor begins at UR14.
LISTING = """\
\t.headerflags\t@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
_kernel:
.text._kernel:
        /*0000*/                   ULDC.64 UR6, c[0x0][0x208] ;
        /*0010*/                   UMOV UR4, 0x400 ;
        /*0020*/                   ISETP.GE.AND P0, PT, R5, UR4, PT ;
        /*0030*/               @P0 BRA `(.L_x_1) ;
        /*0040*/                   USHF.R.U32.HI UR12, URZ, 0x4, UR4 ;
        /*0050*/                   UMOV UR13, 0x40000040 ;
        /*0060*/                   {made} ;
        /*0070*/                   UIADD3 UR14, UP0, UR14, 0x20, URZ ;
        /*0080*/                   UIADD3.X UR15, UR4, -0x3ffffff0, URZ, UP0, !UPT ;
.L_x_0:
        /*0090*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR12].tnspB, R24, gsb0 ;
        /*00a0*/                   UIADD3.64 UR14, UR14, 0x2, URZ ;
        /*00b0*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*00c0*/                   STG.E desc[UR6][R2.64+0x10], R24 ;
        /*00d0*/                   EXIT ;
.L_x_2:
        /*00e0*/                   BRA `(.L_x_2);
"""


def undefined(made: str, listing: str = LISTING) -> tuple[str, ...]:
    return machine_code.undefined_registers(listing.replace("{made}", made))


def test_spills_count_in_the_innermost_loops_of_products_alone():
    spill = "/*00a8*/ STL [R1+0x4], R7 ;"
    before = LISTING.replace(".L_x_0:", f"        {spill}\n.L_x_0:")
    within = LISTING.replace(".L_x_0:", f".L_x_0:\n        {spill}\n        {spill}")
    assert machine_code.spills_in_loops(before) == 0
    assert machine_code.spills_in_loops(within) == 2
    # A wait for a barrier that comes back is a loop around it, and not its innermost.
    around = within.replace("BRA `(.L_x_2);", "BRA `(.L_x_0) ;")
    assert (
        machine_code.spills_in_loops(around.replace("EXIT", f"{spill[9:-2]} ;\n/*00d8*/ EXIT")) == 2
    )


def test_every_operand_made_on_some_path_is_no_fault():
    assert undefined("USHF.R.U32.HI UR14, URZ, 0x4, UR4") == ()
    assert undefined("@P2 R2UR UR14, R7") == ()


def test_operand_that_nothing_makes_is_named_where_it_is_first_read():
    assert undefined("NOP") == ("UR14@0070",)


def test_what_is_made_of_an_undefined_operand_is_undefined():
    assert undefined("UMOV UR14, UR20") == ("UR20@0060", "UR14@0070")


def test_operand_made_where_the_code_does_not_come_by_is_undefined():
    assert undefined("BRA `(.L_x_1)") == ()
    late = LISTING.replace("STG.E desc[UR6]", "UMOV UR14, UR4 ;\n/*00c8*/ STG.E desc[UR6]")
    assert undefined("NOP", late) == ("UR14@0070",)


def test_loop_that_goes_on_from_its_own_operand_makes_none():
    begun = LISTING.replace("UIADD3 UR14, UP0, UR14, 0x20, URZ", "NOP")
    assert undefined("NOP", begun) == ("UR14@0090",)


def test_listing_without_code_is_an_error():
    with pytest.raises(RuntimeError, match="no machine code"):
        machine_code.undefined_registers("")


@pytest.mark.parametrize(
    ("text", "reads", "writes"),
    [
        ("HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24", {8, 9, 10, 11}, set()),
        ("HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR8], R24", {10, 11}, set()),
        ("UIADD3.64 UR46, UR42, 0x2, URZ", {42, 43}, {46, 47}),
        ("UIADD3.X UR15, UR4, -0x3ffffff0, URZ, UP0, !UPT", {4}, {15}),
        ("@!UP1 ULDC.64 UR60, c[0x0][0x208]", set(), {60, 61}),
        ("UISETP.GT.AND UP0, UPT, UR5, 0x1, UPT", {5}, set()),
        ("R2UR.OR P0, UR5, R12", set(), {5}),
        ("LDG.E.128 R16, desc[UR60][R2.64+0x400]", {60, 61}, set()),
        ("STS.U16 [R6+UR4+0x4000], R14", {4}, set()),
    ],
)
def test_instruction_reads_and_writes_these_uniform_registers(text, reads, writes):
    found = machine_code.reads_and_writes(text)
    assert [{i for i in range(64) if bits >> i & 1} for bits in found] == [reads, writes]
