// SPDX-License-Identifier: Apache-2.0
//! All jobs by id, in the order of their creation, with those that are gone and the idempotency keys.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use axum::http::StatusCode;

use super::job::{Client, Job, State};
use crate::errors::ApiError;

/// Ids of removed jobs that are remembered, so that they answer 410 and not 404.
const REMEMBERED: usize = 10_000;

/// A client's key for a request, with a digest of what the request says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdempotencyKey {
    /// Who sent it: keys of different clients never meet.
    pub client: Client,
    /// The header's value.
    pub key: String,
    /// Digest of route and content.
    pub content: [u8; 32],
}

/// What is known about an id.
#[derive(Debug)]
pub enum Found {
    /// The job.
    Job(Arc<Job>),
    /// It was removed.
    Gone,
    /// It never existed.
    Unknown,
}

#[derive(Default)]
pub(super) struct Register {
    jobs: VecDeque<Arc<Job>>,
    by_id: HashMap<String, Arc<Job>>,
    gone: VecDeque<String>,
    gone_ids: HashSet<String>,
    keys: HashMap<(Client, String), Keyed>,
}

/// What an idempotency key stands for.
struct Keyed {
    content: [u8; 32],
    jobs: Vec<Arc<Job>>,
}

impl Register {
    pub fn insert(&mut self, job: Arc<Job>) {
        self.by_id.insert(job.id.clone(), job.clone());
        self.jobs.push_back(job);
    }

    pub fn find(&self, id: &str) -> Found {
        match self.by_id.get(id) {
            Some(job) => Found::Job(job.clone()),
            None if self.gone_ids.contains(id) => Found::Gone,
            None => Found::Unknown,
        }
    }

    pub fn all(&self) -> Vec<Arc<Job>> {
        self.jobs.iter().cloned().collect()
    }

    pub fn remove(&mut self, id: &str) {
        if self.by_id.remove(id).is_none() {
            return;
        }
        self.jobs.retain(|job| job.id != id);
        self.keys.retain(|_, keyed| keyed.jobs.iter().all(|job| job.id != id));
        self.gone.push_back(id.to_owned());
        self.gone_ids.insert(id.to_owned());
        if self.gone.len() > REMEMBERED
            && let Some(oldest) = self.gone.pop_front()
        {
            self.gone_ids.remove(&oldest);
        }
    }

    /// Removes ended jobs that are over age, then the oldest until count and memory are within their limits.
    pub fn reap(&mut self, ttl: Duration, max_count: usize, max_memory: usize) -> usize {
        let mut ended: Vec<(Duration, usize, String)> = self
            .jobs
            .iter()
            .filter_map(|job| Some((job.finished_for()?, job.memory(), job.id.clone())))
            .collect();
        ended.sort_by_key(|(age, ..)| *age);
        let (mut count, mut memory, mut removed) = (0, 0, 0);
        for (age, bytes, id) in ended {
            count += 1;
            memory += bytes;
            if age > ttl || count > max_count || memory > max_memory {
                self.remove(&id);
                removed += 1;
            }
        }
        removed
    }

    /// Jobs of a key. A key whose jobs failed is forgotten, so that a retry runs again.
    pub fn find_key(&mut self, key: &IdempotencyKey) -> Result<Option<Vec<Arc<Job>>>, ApiError> {
        let name = (key.client.clone(), key.key.clone());
        let Some(Keyed { content, jobs }) = self.keys.get(&name) else { return Ok(None) };
        if jobs
            .iter()
            .any(|job| job.stopped().is_some() || matches!(job.state(), State::Error | State::Cancelled))
        {
            self.keys.remove(&name);
            return Ok(None);
        }
        if *content != key.content {
            return Err(ApiError::new(
                StatusCode::UNPROCESSABLE_ENTITY,
                "idempotency_conflict",
                format!("Idempotency-Key: {:?} was used for another request; use a new key", key.key),
            )
            .param("Idempotency-Key"));
        }
        Ok(Some(jobs.clone()))
    }

    pub fn insert_key(&mut self, key: IdempotencyKey, jobs: Vec<Arc<Job>>) {
        self.keys.insert((key.client, key.key), Keyed { content: key.content, jobs });
    }
}
