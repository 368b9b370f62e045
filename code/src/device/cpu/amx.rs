// SPDX-License-Identifier: Apache-2.0
//! AMX: products of bf16 with f32 sums in tiles of 16 × 16, at some twenty times the rate of f32 multiply-adds.
//!
//! A step multiplies 32 rows by 32 columns over 32 values of `k`: four tile loads and four tile products, so that 4 KiB come
//! from the caches for 64 cycles of arithmetic. A panel holds for each step two tiles `[pair of k][16 columns][2]`, which is
//! the transposition that the instruction wants. The rows of a linear lie in tiles too, so that they are read in the order of
//! memory and the processor fetches them ahead. Pixels, queries and probabilities are read in place, from rows that lie an
//! odd number of cache lines apart ([`Unit::stride`]): even ones fall on few cache sets and cost a tenth.
//!
//! Time: with the panel in the first-level cache and the rows from the second, sums read and written every 8 steps, about
//! 55 % of what the tile unit reaches in registers; the loads decide. Longer panels push each other out of the cache,
//! shorter ones pay for the sums.
//!
//! The standard library's intrinsics for tiles are not stable, hence the assembly. Tile registers are configured once for
//! each thread and belong to this module: no compiled code uses them otherwise. Every block of assembly that needs their
//! contents is one block.

#[allow(clippy::wildcard_imports, reason = "the names are Intel's and say which they are")]
use std::arch::x86_64::*;
use std::{arch::asm, cell::Cell, ops::Range};

use half::bf16;

use super::{
    amx_permission::{Permission, permission},
    amx_softmax,
    avx512::{Avx512, transpose_pairs},
    buffer::Buffer,
    kernel::Rows,
    unit::{Panels, Unit},
    weights::RowBytes,
};

/// Values of `k` of a step, and rows and columns that a step multiplies.
const STEP: usize = 32;
/// Rows of a tile.
const TILE: usize = 16;
/// Values of a step of a panel.
const PANEL_STEP: usize = STEP * STEP;
/// A cache line of values.
const LINE: usize = 32;

/// Proof of AMX-TILE and AMX-BF16, of the kernel's permission, and of AVX512-BF16, AVX512BW and AVX512DQ for what
/// surrounds products.
#[derive(Clone, Copy)]
pub struct Amx(Avx512);

impl Amx {
    /// The instruction set, if this processor has it and the system lets this process use it.
    pub fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq");
        Avx512::detect().filter(|_| has && permission() == Permission::Granted).map(Self)
    }
}

/// The operand of `ldtilecfg`: palette 1, all tiles 64 bytes wide.
#[repr(C, align(64))]
struct Configuration([u8; 64]);

thread_local! {
    /// Rows of the tiles that this thread is configured for; 0 before the first time.
    static CONFIGURED: Cell<usize> = const { Cell::new(0) };
}

/// Configures this thread's tiles for `rows` rows of `A` and of the sums: up to 16 in tiles 0, 1 and 4, the rest in 2, 3
/// and 5. Does nothing if they are.
#[inline(always)]
fn configure(_: Amx, rows: usize) {
    if CONFIGURED.get() != rows {
        load_configuration(rows);
        CONFIGURED.set(rows);
    }
}

#[cold]
fn load_configuration(rows: usize) {
    let mut bytes = [0; 64];
    bytes[0] = 1;
    let first = rows.min(TILE);
    let second = rows.saturating_sub(TILE).max(1);
    for (tile, rows) in [first, first, second, second, first, second, TILE, TILE].into_iter().enumerate() {
        bytes[16 + 2 * tile] = 64;
        bytes[48 + tile] = rows as u8;
    }
    let configuration = Configuration(bytes);
    // SAFETY: an `Amx` exists, so the instruction does; the operand is a valid configuration. It clears the tiles, in which
    // nothing is kept between blocks of assembly.
    unsafe {
        asm!(
            "ldtilecfg [{}]",
            in(reg) &raw const configuration,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly),
        );
    };
}

/// Up to 32 rows of a product: as many as the tiles are configured for.
///
/// # Safety
/// As for [`Unit::product`]; there is at least one run of at least one step.
#[inline(always)]
unsafe fn two_by_two(a: Rows<'_, u16>, b: *const u16, c: *mut f32, c_stride: usize, accumulate: bool) {
    // SAFETY: the tiles are configured; loads and stores are inside A, B and C by the caller's contract.
    unsafe {
        asm!(
            // The lower half of the sums.
            "lea {low}, [{c_stride} * 8]",
            "lea {low}, [{c} + {low} * 2]",
            "test {k:e}, {k:e}",
            "jz 2f",
            "tileloadd tmm0, [{c} + {c_stride}]",
            "tileloadd tmm1, [{c} + {c_stride} + 64]",
            "tileloadd tmm2, [{low} + {c_stride}]",
            "tileloadd tmm3, [{low} + {c_stride} + 64]",
            "jmp 3f",
            "2:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            // A run.
            "3:",
            "mov {low}, [{runs}]",
            "add {runs}, 8",
            "lea {at}, [{a} + {low} * 2]",
            "lea {low}, [{a_stride} * 8]",
            "lea {low}, [{at} + {low} * 2]",
            "mov {k}, {steps}",
            ".p2align 5",
            // A step.
            "4:",
            "tileloadd tmm4, [{at} + {a_stride}]",
            "tileloadd tmm6, [{b} + {line}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {line} + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{low} + {a_stride}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {at}, {advance}",
            "add {low}, {advance}",
            "add {b}, 2048",
            "dec {k}",
            "jnz 4b",
            "dec {count}",
            "jnz 3b",
            "lea {low}, [{c_stride} * 8]",
            "lea {low}, [{c} + {low} * 2]",
            "tilestored [{c} + {c_stride}], tmm0",
            "tilestored [{c} + {c_stride} + 64], tmm1",
            "tilestored [{low} + {c_stride}], tmm2",
            "tilestored [{low} + {c_stride} + 64], tmm3",
            a = in(reg) a.start,
            a_stride = in(reg) 2 * a.stride,
            advance = in(reg) if a.tiled { 2 * PANEL_STEP } else { 2 * STEP },
            runs = inout(reg) a.runs.as_ptr() => _,
            count = inout(reg) a.runs.len() => _,
            steps = in(reg) a.len / STEP,
            b = inout(reg) b => _,
            c = in(reg) c,
            c_stride = in(reg) 4 * c_stride,
            line = in(reg) 64usize,
            k = inout(reg) usize::from(accumulate) => _,
            at = out(reg) _,
            low = out(reg) _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Up to 16 rows of a product: as many as the tiles are configured for.
///
/// # Safety
/// As for [`two_by_two`].
#[inline(always)]
unsafe fn one_by_two(a: Rows<'_, u16>, b: *const u16, c: *mut f32, c_stride: usize, accumulate: bool) {
    // SAFETY: the tiles are configured; loads and stores are inside A, B and C by the caller's contract.
    unsafe {
        asm!(
            "test {k:e}, {k:e}",
            "jz 2f",
            "tileloadd tmm0, [{c} + {c_stride}]",
            "tileloadd tmm1, [{c} + {c_stride} + 64]",
            "jmp 3f",
            "2:",
            "tilezero tmm0",
            "tilezero tmm1",
            "3:",
            "mov {at}, [{runs}]",
            "add {runs}, 8",
            "lea {at}, [{a} + {at} * 2]",
            "mov {k}, {steps}",
            "4:",
            "tileloadd tmm4, [{at} + {a_stride}]",
            "tileloadd tmm6, [{b} + {line}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {line} + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "add {at}, {advance}",
            "add {b}, 2048",
            "dec {k}",
            "jnz 4b",
            "dec {count}",
            "jnz 3b",
            "tilestored [{c} + {c_stride}], tmm0",
            "tilestored [{c} + {c_stride} + 64], tmm1",
            a = in(reg) a.start,
            a_stride = in(reg) 2 * a.stride,
            advance = in(reg) if a.tiled { 2 * PANEL_STEP } else { 2 * STEP },
            runs = inout(reg) a.runs.as_ptr() => _,
            count = inout(reg) a.runs.len() => _,
            steps = in(reg) a.len / STEP,
            b = inout(reg) b => _,
            c = in(reg) c,
            c_stride = in(reg) 4 * c_stride,
            line = in(reg) 64usize,
            k = inout(reg) usize::from(accumulate) => _,
            at = out(reg) _,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// 32 values, rounded to nearest-even bf16.
///
/// # Safety
/// `from` points to 32 readable values.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn narrow(from: *const f32) -> __m512i {
    // SAFETY: the caller's contract; both types are 512 bits.
    unsafe {
        let (low, high) = (_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16)));
        std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low))
    }
}

/// See [`Unit::encode`].
#[target_feature(enable = "avx512f,avx512bf16")]
fn encode(from: &[f32], to: &mut [u16]) {
    let (whole, rest) = from.as_chunks::<LINE>();
    let (to, end) = to.split_at_mut(LINE * whole.len());
    for (from, to) in whole.iter().zip(to.as_chunks_mut::<LINE>().0) {
        // SAFETY: both chunks have 32 values.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), narrow(from.as_ptr())) };
    }
    end.fill(0);
    for (from, to) in rest.iter().zip(end) {
        *to = bf16::from_f32(*from).to_bits();
    }
}

/// Up to a step of a row, zeros after it.
#[target_feature(enable = "avx512f")]
fn row_step(row: Option<&RowBytes<'_>>, range: Range<usize>) -> __m512i {
    let Some(row) = row else { return _mm512_setzero_si512() };
    if let Some(values) = row.bf16(range.clone()).filter(|_| range.len() == STEP) {
        // SAFETY: the row has 32 values in the range.
        return unsafe { _mm512_loadu_si512(values.cast()) };
    }
    let mut values = [0u16; STEP];
    for (value, k) in values.iter_mut().zip(range) {
        *value = bf16::from_f32(row.value(k)).to_bits();
    }
    // SAFETY: there are 32 values.
    unsafe { _mm512_loadu_si512(values.as_ptr().cast()) }
}

/// See [`Unit::pack`].
#[target_feature(enable = "avx512f")]
fn pack(rows: &[Option<RowBytes<'_>>], range: Range<usize>, panel: &mut [u16]) {
    let steps = panel[..range.len().next_multiple_of(STEP) * STEP].as_chunks_mut::<PANEL_STEP>().0;
    // A tile of rows from end to end, then the other: the processor fetches ahead in about as many rows as a tile has.
    for (half, rows) in rows.as_chunks::<TILE>().0.iter().enumerate() {
        for (step, to) in steps.iter_mut().enumerate() {
            let start = range.start + STEP * step;
            let range = start..range.end.min(start + STEP);
            let mut lines = [_mm512_setzero_si512(); TILE];
            for (line, row) in lines.iter_mut().zip(rows) {
                *line = row_step(row.as_ref(), range.clone());
            }
            let to = to[half * TILE * LINE..].as_chunks_mut::<LINE>().0;
            for (line, to) in transpose_pairs(&lines).iter().zip(to) {
                // SAFETY: a line has 32 values.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), *line) };
            }
        }
    }
}

/// See [`Unit::pack_values`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn pack_values(values: &[f32], panel: &mut [u16]) {
    // Lane i of the result is lane i / 2 of the first or of the second half.
    let order: [u16; LINE] = std::array::from_fn(|i| (i / 2 + i % 2 * TILE) as u16);
    // SAFETY: there are 32 lanes.
    let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
    let steps = panel[..values.len()].as_chunks_mut::<PANEL_STEP>().0;
    for (from, to) in values.as_chunks::<PANEL_STEP>().0.iter().zip(steps) {
        for pair in 0..STEP / 2 {
            for half in 0..2 {
                // SAFETY: rows `2 pair` and the next have 16 columns from `16 half` on, and so has the line.
                unsafe {
                    let first = _mm512_loadu_ps(from.as_ptr().add(2 * pair * STEP + half * TILE));
                    let second = _mm512_loadu_ps(from.as_ptr().add((2 * pair + 1) * STEP + half * TILE));
                    let both = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first));
                    let line = _mm512_permutexvar_epi16(order, both);
                    let at = half * TILE * LINE + pair * LINE;
                    _mm512_storeu_si512(to.as_mut_ptr().add(at).cast(), line);
                }
            }
        }
    }
}

impl Unit for Amx {
    type S = Avx512;
    type Value = u16;
    const CODED: bool = true;
    const SCALED: bool = false;
    const STEP: usize = STEP;
    const TILED: bool = true;
    /// 16 KiB of panel and as much of rows at once: measured best of 192 to 1,536.
    const DEPTH: usize = 256;
    const PACKED_SLICES: usize = 2;
    const TASK_COLUMNS: usize = 256;

    #[inline(always)]
    fn simd(self) -> Avx512 {
        self.0
    }
    fn stride(len: usize) -> usize {
        (len.div_ceil(LINE) | 1) * LINE
    }
    #[inline(always)]
    fn encode(self, from: &[f32], to: &mut [u16]) -> f32 {
        assert!(from.len() <= to.len(), "room for fewer values than there are");
        // SAFETY: the features were detected.
        unsafe { encode(from, to) };
        1.0
    }
    fn encode_rows(
        self,
        from: &[f32],
        from_stride: usize,
        rows: usize,
        len: usize,
        to: &mut [u16],
        _stride: usize,
        _scales: &mut [f32],
    ) {
        assert!(rows <= STEP && to.len() >= STEP * len.next_multiple_of(STEP), "room for fewer tiles");
        for row in 0..rows {
            for (step, from) in from[row * from_stride..][..len].chunks(STEP).enumerate() {
                let to = &mut to[step * PANEL_STEP + row * STEP..][..STEP];
                // SAFETY: the features were detected.
                unsafe { encode(from, to) };
            }
        }
    }
    #[inline(always)]
    fn largest(self, scores: &[f32]) -> f32 {
        // SAFETY: the features were detected.
        unsafe { amx_softmax::largest(scores) }
    }
    #[inline(always)]
    fn exponentials(
        self,
        scores: &mut [f32],
        seen: Range<usize>,
        scale: f32,
        base: f32,
        to: &mut [u16],
    ) -> (f32, f32) {
        to[..seen.start].fill(0);
        to[seen.end..].fill(0);
        // SAFETY: the features were detected.
        let total = unsafe { amx_softmax::exponentials(&scores[seen.clone()], scale, base, &mut to[seen]) };
        (total, 1.0)
    }
    #[inline(always)]
    fn pack(self, rows: &[Option<RowBytes<'_>>], range: Range<usize>, panel: &mut [u16]) -> f32 {
        assert_eq!(rows.len(), 2 * TILE, "rows of a panel");
        // SAFETY: the features were detected.
        unsafe { pack(rows, range, panel) };
        1.0
    }
    #[inline(always)]
    fn view<'a>(self, from: &'a [f32], room: &'a mut [u16]) -> (&'a [u16], f32) {
        let room = &mut room[..from.len()];
        self.encode(from, room);
        (room, 1.0)
    }
    #[inline(always)]
    fn scale(self, _largest: f32) -> (f32, f32) {
        (1.0, 1.0)
    }
    #[inline(always)]
    fn pack_values(self, values: &[f32], _factor: f32, panel: &mut [u16]) {
        assert_eq!(values.len() % PANEL_STEP, 0, "whole steps");
        // SAFETY: the features were detected.
        unsafe { pack_values(values, panel) };
    }
    fn decode(self, value: u16) -> f32 {
        bf16::from_bits(value).to_f32()
    }
    fn unpack(self, panel: &[u16], k: usize, column: usize) -> f32 {
        let tile = &panel[k / STEP * PANEL_STEP + column / TILE * TILE * LINE..];
        self.decode(tile[k % STEP / 2 * LINE + column % TILE * 2 + k % 2])
    }
    fn keep(self, values: Vec<f32>, _lens: impl Iterator<Item = usize>, _round: bool) -> Panels {
        let mut panels = Buffer::zeros(values.len().div_ceil(2));
        self.pack_values(&values, 1.0, bytemuck::cast_slice_mut(&mut panels));
        Panels::Tiles(panels)
    }
    #[inline(always)]
    fn kept<'a>(
        self,
        panels: &'a Panels,
        _index: usize,
        range: Range<usize>,
        _room: &'a mut [u16],
    ) -> (&'a [u16], f32) {
        match panels {
            Panels::Tiles(values) => (&bytemuck::cast_slice(values)[range], 1.0),
            Panels::F32(_) | Panels::Bf16(_) | Panels::Fp16(..) => unreachable!("kept by another unit"),
        }
    }
    #[inline(always)]
    unsafe fn product(
        self,
        rows: usize,
        a: Rows<'_, u16>,
        _scales: *const f32,
        b: *const u16,
        _scale: f32,
        c: *mut f32,
        c_stride: usize,
        accumulate: bool,
    ) {
        if a.runs.is_empty() || a.len == 0 {
            for row in 0..if accumulate { 0 } else { rows } {
                // SAFETY: C has the row.
                unsafe { std::slice::from_raw_parts_mut(c.add(row * c_stride), 2 * TILE) }.fill(0.0);
            }
            return;
        }
        let mut done = 0;
        while done < rows {
            let count = (rows - done).min(2 * TILE);
            configure(self, count);
            // SAFETY: the tiles are configured; rows done..done + count are inside A and C by the caller's contract.
            unsafe {
                // In tiles the 32 rows of a step take the place of `len` values each.
                let (pitch, stride) = if a.tiled { (a.len, STEP) } else { (a.stride, a.stride) };
                let a = Rows { start: a.start.add(done * pitch), stride, ..a };
                let c = c.add(done * c_stride);
                if count > TILE {
                    two_by_two(a, b, c, c_stride, accumulate);
                } else {
                    one_by_two(a, b, c, c_stride, accumulate);
                }
            }
            done += count;
        }
    }
    fn burst(self) -> f64 {
        const STEPS: usize = 50_000;
        // Bits as of numbers between -2 and 2: the unit slows down when many of them change.
        let mut values = [[0u16; LINE]; 4 * TILE];
        for (i, value) in values.as_flattened_mut().iter_mut().enumerate() {
            *value = bf16::from_f32((i as f32 * 0.618_034).fract() * 4.0 - 2.0).to_bits();
        }
        configure(self, 2 * TILE);
        // SAFETY: the tiles are configured, and `values` holds four of them.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "tileloadd tmm4, [{at} + {line}]",
                "tileloadd tmm5, [{at} + {line} + 1024]",
                "tileloadd tmm6, [{at} + {line} + 2048]",
                "tileloadd tmm7, [{at} + {line} + 3072]",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {k}",
                "jnz 2b",
                at = in(reg) values.as_ptr(),
                line = in(reg) 64usize,
                k = inout(reg) STEPS => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly),
            );
        }
        (2 * 4 * TILE * TILE * STEP * STEPS) as f64
    }
}
