// SPDX-License-Identifier: Apache-2.0
//! Thread pools, one per thread count in a process, so that two pipelines share their threads instead of fighting.

use std::{
    collections::{BTreeSet, HashMap},
    num::NonZero,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};

static POOLS: Mutex<Option<HashMap<usize, Weak<ThreadPool>>>> = Mutex::new(None);

/// The process's pool of `threads` threads.
///
/// # Errors
/// If `threads` is 0 or the system refuses to start them.
pub fn pool(threads: usize) -> Result<Arc<ThreadPool>> {
    let refuse = |what: String| Error::Device { device: "cpu".into(), operation: "open", what };
    if threads == 0 {
        return Err(refuse("0 threads asked for; give 1 or more".into()));
    }
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    let pools = pools.get_or_insert_default();
    if let Some(pool) = pools.get(&threads).and_then(Weak::upgrade) {
        return Ok(pool);
    }
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("flux2-cpu-{i}"))
        .build()
        .map_err(|error| refuse(format!("{threads} threads could not be started: {error}")))?;
    let pool = Arc::new(pool);
    pools.insert(threads, Arc::downgrade(&pool));
    Ok(pool)
}

/// Physical cores that this process may use: its affinity and CPU quota, SMT siblings counted once.
pub fn default_threads() -> usize {
    let logical = std::thread::available_parallelism().map_or(1, NonZero::get);
    physical_cores().map_or(logical, |cores| logical.min(cores)).max(1)
}

/// Distinct cores among the CPUs of the affinity mask, where Linux tells.
fn physical_cores() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let cores: Option<BTreeSet<String>> = cpu_list(list)?
        .into_iter()
        .map(|cpu| {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            std::fs::read_to_string(path).ok()
        })
        .collect();
    cores.map(|cores| cores.len()).filter(|&cores| cores > 0)
}

/// `0-3,8` as numbers.
fn cpu_list(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::float_cmp, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_read() {
        assert_eq!(cpu_list(" 0-2,5,7-8\n"), Some(vec![0, 1, 2, 5, 7, 8]));
        assert_eq!(cpu_list("x"), None);
    }

    #[test]
    fn pools_of_one_size_are_shared_and_zero_is_refused() {
        let (a, b) = (pool(3).unwrap(), pool(3).unwrap());
        assert!(Arc::ptr_eq(&a, &b));
        assert!(pool(0).unwrap_err().to_string().contains("0 threads"));
    }
}
