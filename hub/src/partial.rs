// SPDX-License-Identifier: Apache-2.0
//! A blob on its way: which bytes of it are there, whose it is, and how it outlives its process.
//!
//! `<id>.<machine>.<process>.<start>.<n>.incomplete` holds bytes at their final places; beside it, `.done` lists the
//! granules that are whole, four bytes each, appended after the bytes. Both survive a killed process. The name says
//! whether its process lives, so that no lock is needed: the work of a dead one is taken over by renaming it, which
//! one taker only can do; where the process cannot be seen (another machine or container), its age decides.

use std::{
    collections::HashSet,
    fs::{self, OpenOptions},
    io::Write as _,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::{
        LazyLock, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use sha2::{Digest as _, Sha256};

use crate::{
    cache::hex,
    error::{At, Result},
};

/// Bytes that are recorded as done together.
pub const GRANULE: u64 = 4 << 20;
/// After this long without a write, a download of an unseen process counts as given up.
pub const ABANDONED: Duration = Duration::from_mins(15);
const SUFFIX: &str = "incomplete";

/// This boot of this machine, in this space of process numbers.
static MACHINE: LazyLock<String> = LazyLock::new(|| {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    hex(&Sha256::digest(format!("{boot}{}", space.display())))[..12].to_owned()
});
static COUNTER: AtomicU64 = AtomicU64::new(0);
/// What this process writes now: its own failed downloads are abandoned too.
static ACTIVE: LazyLock<Mutex<HashSet<PathBuf>>> = LazyLock::new(Mutex::default);

/// A name that no other file has: machine, process, its start, a number.
pub fn unique() -> String {
    let pid = std::process::id();
    let start = start_of(pid).unwrap_or_default();
    format!("{}.{pid}.{start}.{}", *MACHINE, COUNTER.fetch_add(1, Ordering::Relaxed))
}

/// Clock ticks from boot to the start of a process; none if it does not live.
fn start_of(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in brackets may hold anything; the state is the first field after it, the start the twentieth.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    let dead = matches!(fields.next()?, "Z" | "X");
    fields.nth(18)?.parse().ok().filter(|_| !dead)
}

/// Who writes an incomplete blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// A process of this machine that lives.
    Living(u32),
    /// Nobody any more.
    Dead,
    /// Somebody elsewhere, until it has been quiet for [`ABANDONED`].
    Unseen,
}

/// The incomplete blobs of `id` and who writes them.
pub fn others(blobs: &Path, id: &str) -> Vec<(PathBuf, Owner)> {
    let entries = fs::read_dir(blobs).into_iter().flatten().flatten();
    let ours = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let owner = owner(name.strip_prefix(id)?.strip_prefix('.')?, &entry.path())?;
        Some((entry.path(), owner))
    });
    ours.collect()
}

fn owner(name: &str, path: &Path) -> Option<Owner> {
    let mut parts = name.split('.');
    let (machine, pid, start, _, suffix) = (
        parts.next()?,
        parts.next()?.parse().ok()?,
        parts.next()?.parse::<u64>().ok()?,
        parts.next()?,
        parts.next()?,
    );
    if suffix != SUFFIX || parts.next().is_some() {
        return None;
    }
    Some(if machine == *MACHINE {
        let own = pid == std::process::id();
        let given_up = own && !ACTIVE.lock().expect("no holder panics").contains(path);
        if start_of(pid) == Some(start) && !given_up { Owner::Living(pid) } else { Owner::Dead }
    } else {
        let quiet = fs::metadata(path).and_then(|meta| meta.modified()).ok().and_then(|at| at.elapsed().ok());
        if quiet.is_some_and(|quiet| quiet > ABANDONED) { Owner::Dead } else { Owner::Unseen }
    })
}

/// An incomplete blob of this process.
#[derive(Debug)]
pub struct Partial {
    path: PathBuf,
    file: fs::File,
    size: u64,
    journal: Mutex<Journal>,
}

#[derive(Debug)]
struct Journal {
    file: Option<fs::File>,
    done: Vec<bool>,
    /// Bytes of each granule that were written by this process.
    written: Vec<u64>,
}

impl Partial {
    /// Takes over the fullest abandoned download of `id`, or starts one.
    pub fn open(blobs: &Path, id: &str, size: u64) -> Result<Self> {
        fs::create_dir_all(blobs).at("create", blobs)?;
        let path = blobs.join(format!("{id}.{}.{SUFFIX}", unique()));
        let mut dead: Vec<PathBuf> = others(blobs, id)
            .into_iter()
            .filter(|(_, owner)| *owner == Owner::Dead)
            .map(|(path, _)| path)
            .collect();
        dead.sort_by_key(|path| fs::metadata(journal_of(path)).map_or(0, |meta| meta.len()));
        if let Some(fullest) = dead.pop() {
            // The list of what is done first: without its bytes it is nothing, bytes without it are only lost work.
            let _ = fs::rename(journal_of(&fullest), journal_of(&path));
            if fs::rename(&fullest, &path).is_err() {
                let _ = fs::remove_file(journal_of(&path));
            }
        }
        for path in dead {
            let _ = fs::remove_file(journal_of(&path));
            let _ = fs::remove_file(path);
        }

        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .at("write", &path)?;
        ACTIVE.lock().expect("no holder panics").insert(path.clone());
        // A longer file belongs to something else; and what was never written cannot be done.
        let length = file.metadata().at("inspect", &path)?.len();
        let granules = size.div_ceil(GRANULE) as usize;
        let mut done = vec![false; granules];
        let entries = fs::read(journal_of(&path)).unwrap_or_default();
        for entry in entries.chunks_exact(4).filter(|_| length <= size) {
            let index = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]) as usize;
            if index < granules && end(index, size) <= length {
                done[index] = true;
            }
        }
        let partial = Self {
            path,
            file,
            size,
            journal: Mutex::new(Journal { file: None, done, written: vec![0; granules] }),
        };
        // A killed process may have written half an entry, behind which no other would be read.
        if length > size || !entries.len().is_multiple_of(4) {
            partial.restart()?;
        }
        Ok(partial)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that are there for good.
    pub fn have(&self) -> u64 {
        let journal = self.journal.lock().expect("no writer panics");
        let done = journal.done.iter().enumerate().filter(|(_, done)| **done);
        done.map(|(index, _)| end(index, self.size) - index as u64 * GRANULE).sum()
    }

    /// The ranges still to come, none longer than `longest` (rounded up to whole granules).
    pub fn missing(&self, longest: u64) -> Vec<(u64, u64)> {
        let journal = self.journal.lock().expect("no writer panics");
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for index in journal.done.iter().enumerate().filter(|(_, done)| !**done).map(|(index, _)| index) {
            let (start, end) = (index as u64 * GRANULE, end(index, self.size));
            match ranges.last_mut() {
                Some(last) if last.1 == start && end - last.0 <= longest => last.1 = end,
                _ => ranges.push((start, end)),
            }
        }
        ranges
    }

    /// Writes bytes at their place; a granule that is whole is recorded.
    pub fn write(&self, mut at: u64, mut bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, at).at("write", &self.path)?;
        let mut journal = self.journal.lock().expect("no writer panics");
        while !bytes.is_empty() {
            let index = (at / GRANULE) as usize;
            let here = (end(index, self.size) - at).min(bytes.len() as u64);
            journal.written[index] += here;
            if !journal.done[index]
                && journal.written[index] >= end(index, self.size) - index as u64 * GRANULE
            {
                journal.done[index] = true;
                self.record(&mut journal, index)?;
            }
            at += here;
            bytes = &bytes[here as usize..];
        }
        Ok(())
    }

    /// A file of one granule needs no list: it is there or not.
    fn record(&self, journal: &mut Journal, index: usize) -> Result<()> {
        if self.size <= GRANULE {
            return Ok(());
        }
        let path = journal_of(&self.path);
        if journal.file.is_none() {
            journal.file = Some(OpenOptions::new().append(true).create(true).open(&path).at("write", &path)?);
        }
        let entry = (index as u32).to_le_bytes();
        journal.file.as_mut().map_or(Ok(()), |file| file.write_all(&entry)).at("write", &path)
    }

    /// Throws away everything that is there.
    pub fn restart(&self) -> Result<()> {
        let mut journal = self.journal.lock().expect("no writer panics");
        journal.file = None;
        journal.done.fill(false);
        journal.written.fill(0);
        let _ = fs::remove_file(journal_of(&self.path));
        self.file.set_len(0).at("write", &self.path)
    }

    /// Makes it the blob at `target`: on the disk first, so that a power cut leaves no blob without its bytes.
    pub fn finish(&self, target: &Path) -> Result<()> {
        self.file.sync_data().at("write", &self.path)?;
        fs::rename(&self.path, target).at("put into place", target)?;
        let _ = fs::remove_file(journal_of(&self.path));
        Ok(())
    }

    /// Removes it.
    pub fn discard(&self) {
        let _ = fs::remove_file(journal_of(&self.path));
        let _ = fs::remove_file(&self.path);
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        ACTIVE.lock().expect("no holder panics").remove(&self.path);
    }
}

fn end(index: usize, size: u64) -> u64 {
    ((index as u64 + 1) * GRANULE).min(size)
}

fn journal_of(path: &Path) -> PathBuf {
    path.with_extension("done")
}
