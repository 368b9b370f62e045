// SPDX-License-Identifier: Apache-2.0
//! Which instructions to use: what the processor has, or what `FLUX2_CPU_ISA` forces.

use std::fmt;

use super::simd::Portable;
use crate::error::{Error, Result};

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// In bf16, products in tiles; 512-bit vectors for all else.
    Amx,
    /// 512-bit vectors; in bf16, products in fp16.
    Avx512Fp16,
    /// 512-bit vectors, bf16 widened to f32.
    Avx512,
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// What the compiler makes of plain Rust on the target's base instructions.
    Portable,
}

impl Isa {
    /// All, the fastest first.
    pub const ALL: [Self; 5] = [Self::Amx, Self::Avx512Fp16, Self::Avx512, Self::Avx2, Self::Portable];

    /// As `FLUX2_CPU_ISA` spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Amx => "amx",
            Self::Avx512Fp16 => "avx512fp16",
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
        }
    }

    /// Whether this processor and system can run it. Each is detected by itself, never inferred from another.
    pub fn available(self) -> bool {
        self.detect().is_some()
    }

    /// The fastest that is available, or what `FLUX2_CPU_ISA` says.
    ///
    /// # Errors
    /// If the variable names no instruction set, or one that this host lacks.
    pub fn choose() -> Result<Self> {
        if let Some(name) = std::env::var_os("FLUX2_CPU_ISA") {
            return Self::forced(&name.to_string_lossy());
        }
        let best = Self::ALL.into_iter().find(|isa| isa.available()).unwrap_or(Self::Portable);
        #[cfg(target_arch = "x86_64")]
        super::amx_permission::warn_if_refused(best.name());
        Ok(best)
    }

    fn forced(name: &str) -> Result<Self> {
        let names = Self::ALL.map(Self::name).join(", ");
        let Some(isa) = Self::ALL.into_iter().find(|isa| isa.name() == name) else {
            return Err(unavailable(format!(
                "FLUX2_CPU_ISA is {name:?}; it must be one of {names}, or unset"
            )));
        };
        isa.kernels().map(|_| isa)
    }

    /// The kernels, or an error that says what the host has instead.
    pub(super) fn kernels(self) -> Result<Kernels> {
        self.detect().ok_or_else(|| {
            let have: Vec<_> = Self::ALL.into_iter().filter(|isa| isa.available()).map(Self::name).collect();
            unavailable(format!("this host has no {self}{}; it can run {}", self.why_not(), have.join(", ")))
        })
    }

    /// What an error adds where the processor would have it.
    #[allow(clippy::unused_self, reason = "used where there is an instruction set to refuse")]
    fn why_not(self) -> String {
        #[cfg(target_arch = "x86_64")]
        if let (Self::Amx, Some(why)) = (self, super::amx_permission::refusal()) {
            return format!(" that this process may use: {why}");
        }
        String::new()
    }

    fn detect(self) -> Option<Kernels> {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => super::amx::Amx::detect().map(Kernels::Amx),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Fp16 => super::avx512fp16::Avx512Fp16::detect().map(Kernels::Avx512Fp16),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => super::avx512::Avx512::detect().map(Kernels::Avx512),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => super::avx2::Avx2::detect().map(Kernels::Avx2),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Amx | Self::Avx512Fp16 | Self::Avx512 | Self::Avx2 => None,
            Self::Portable => Some(Kernels::Portable(Portable)),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

fn unavailable(what: String) -> Error {
    Error::Device { device: "cpu".into(), operation: "open", what }
}

/// The proof that goes with an [`Isa`].
#[derive(Clone, Copy)]
pub(super) enum Kernels {
    #[cfg(target_arch = "x86_64")]
    Amx(super::amx::Amx),
    #[cfg(target_arch = "x86_64")]
    Avx512Fp16(super::avx512fp16::Avx512Fp16),
    #[cfg(target_arch = "x86_64")]
    Avx512(super::avx512::Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx2(super::avx2::Avx2),
    Portable(Portable),
}

/// Runs an expression with `$simd` bound to the vector type in use.
macro_rules! dispatch {
    ($kernels:expr, $simd:ident => $body:expr) => {
        match $kernels {
            #[cfg(target_arch = "x86_64")]
            $crate::device::cpu::isa::Kernels::Amx(unit) => {
                let $simd = $crate::device::cpu::unit::Unit::simd(unit);
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::device::cpu::isa::Kernels::Avx512Fp16(unit) => {
                let $simd = $crate::device::cpu::unit::Unit::simd(unit);
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::device::cpu::isa::Kernels::Avx512($simd) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::device::cpu::isa::Kernels::Avx2($simd) => $body,
            $crate::device::cpu::isa::Kernels::Portable($simd) => $body,
        }
    };
}
pub(super) use dispatch;

/// Runs an expression with `$unit` bound to what multiplies matrices in a precision.
macro_rules! dispatch_unit {
    ($kernels:expr, $precision:expr, $unit:ident => $body:expr) => {
        match ($kernels, $precision) {
            #[cfg(target_arch = "x86_64")]
            ($crate::device::cpu::isa::Kernels::Amx($unit), $crate::device::Precision::Bf16) => $body,
            #[cfg(target_arch = "x86_64")]
            ($crate::device::cpu::isa::Kernels::Avx512Fp16($unit), $crate::device::Precision::Bf16) => $body,
            (kernels, _) => $crate::device::cpu::isa::dispatch!(kernels, simd => {
                let $unit = $crate::device::cpu::unit::Single(simd);
                $body
            }),
        }
    };
}
pub(super) use dispatch_unit;

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::float_cmp, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_forced_instruction_set_must_exist() {
        assert_eq!(Isa::forced("portable").unwrap(), Isa::Portable);
        let error = Isa::forced("mmx").unwrap_err().to_string();
        assert!(error.contains("\"mmx\"") && error.contains("portable"), "{error}");
    }
}
