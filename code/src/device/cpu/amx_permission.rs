// SPDX-License-Identifier: Apache-2.0
//! Whether this process may use AMX: what the processor says, what the system keeps across context switches, and what
//! Linux answers when it is asked for the tile registers, as it wants to be once per process.

use std::{
    arch::{
        asm,
        x86_64::{__cpuid, __cpuid_count},
    },
    sync::{Once, OnceLock},
};

/// What asking came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// Tiles may be used by every thread.
    Granted,
    /// The processor has no AMX-BF16.
    Lacking,
    /// The processor has it, but the system does not let us: the negated error number, or 0 for one that does not know AMX.
    Refused(i64),
}

/// Asks once in a process.
pub fn permission() -> Permission {
    static PERMISSION: OnceLock<Permission> = OnceLock::new();
    *PERMISSION.get_or_init(ask)
}

/// Why the system does not let us, if it does not.
pub fn refusal() -> Option<String> {
    match permission() {
        Permission::Granted | Permission::Lacking => None,
        Permission::Refused(0) => Some("the processor has AMX, but the system does not switch it on".into()),
        Permission::Refused(error) => {
            Some(format!("the processor has AMX, but the kernel refuses it (arch_prctl: error {})", -error))
        }
    }
}

/// Says once in a process that AMX is refused and what is used instead.
pub fn warn_if_refused(instead: &str) {
    static SAY: Once = Once::new();
    if let Some(why) = refusal() {
        SAY.call_once(|| eprintln!("warning: {why}; the CPU device uses {instead}, which is slower in bf16"));
    }
}

#[allow(unused_unsafe, reason = "cpuid is safe in later toolchains")]
fn ask() -> Permission {
    const OSXSAVE: u32 = 1 << 27;
    const AMX_BF16_AND_TILE: u32 = 1 << 22 | 1 << 24;
    /// Tile configuration and tile data, in XCR0.
    const TILES: u32 = 0b11 << 17;
    // SAFETY: every x86-64 processor has the instruction.
    let (last, features) = unsafe { (__cpuid(0).eax, __cpuid(1).ecx) };
    // SAFETY: as above.
    if last < 7 || unsafe { __cpuid_count(7, 0) }.edx & AMX_BF16_AND_TILE != AMX_BF16_AND_TILE {
        return Permission::Lacking;
    }
    if features & OSXSAVE == 0 {
        return Permission::Refused(0);
    }
    let kept: u32;
    // SAFETY: the system has switched the instruction on.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") kept, out("edx") _, options(nomem, nostack)) };
    if kept & TILES != TILES {
        return Permission::Refused(0);
    }
    match request() {
        0 => Permission::Granted,
        error => Permission::Refused(error),
    }
}

/// `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`: 0 or a negated error number.
#[cfg(target_os = "linux")]
fn request() -> i64 {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    let result: i64;
    // SAFETY: this call reads and writes no memory of ours, and changes what the process may do only by allowing more.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// Other systems are not asked.
#[cfg(not(target_os = "linux"))]
fn request() -> i64 {
    -1
}
