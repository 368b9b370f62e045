// SPDX-License-Identifier: Apache-2.0
//! What commands print. A reader that has seen enough (`| head -1`) is no failure, and never a panic as with `println!`.

use std::{
    fmt,
    io::{ErrorKind, Write},
};

use crate::failure::Failure;

/// Prints a line on standard output and flushes it.
///
/// # Errors
/// Anything but a reader that is gone: a full disk behind `> file`.
pub fn line(text: fmt::Arguments<'_>) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::Other(format!("standard output cannot be written: {error}")))
        }
        _ => Ok(()),
    }
}

/// Tells something on standard error; where that is closed there is nobody to tell.
pub fn note(text: fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// [`line()`] of a format string, and returns its error.
macro_rules! print_line {
    ($($argument:tt)*) => { $crate::stdout::line(format_args!($($argument)*))? };
}
/// [`note()`] of a format string.
macro_rules! tell {
    ($($argument:tt)*) => { $crate::stdout::note(format_args!($($argument)*)) };
}
pub(crate) use {print_line, tell};
