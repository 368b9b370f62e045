// SPDX-License-Identifier: Apache-2.0
//! Watching a run: what each operation does, who wants to know, and the values of named stages.

use super::Shape;
use crate::error::Result;

/// One operation of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// Name of the method of [`Device`](super::Device).
    pub name: &'static str,
    /// Shapes that decide the work, readable: `[1536, 3072] x [9216, 3072]`.
    pub shapes: String,
    /// Floating-point operations, two per multiply-add; row operations count one per value.
    pub flops: u64,
    /// Bytes of the result at four per value.
    pub bytes: u64,
}

/// Watches a run. All methods have empty defaults.
pub trait Observer {
    /// Called before each operation; an error stops the run.
    fn before(&mut self, _operation: &Operation) -> Result<()> {
        Ok(())
    }
    /// Called after each operation.
    fn after(&mut self, _operation: &Operation) {}
    /// Whether [`Observer::value`] wants the value of a named stage (it costs a download).
    fn wants(&self, _stage: &str) -> bool {
        false
    }
    /// The value of a named stage of the model, as `dit.double0.text` or `vae.decoder.mid`.
    fn value(&mut self, _stage: &str, _shape: Shape, _values: &[f32]) {}
}

/// An observer that writes down every operation.
#[derive(Default)]
pub struct Trace {
    /// Operations in order.
    pub operations: Vec<Operation>,
}

impl Observer for Trace {
    fn before(&mut self, operation: &Operation) -> Result<()> {
        self.operations.push(operation.clone());
        Ok(())
    }
}
