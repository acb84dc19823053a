//! Configuration of the model controller.

use crate::namespace::Namespace;
use pinfold_nvme::spec::SglSupport;
use std::time::Duration;

/// Configures a model controller.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// The namespaces; the first has NSID 1.
    pub namespaces: Vec<Namespace>,
    /// MDTS: the largest transfer is `4096 << mdts` bytes; 0 means no limit.
    pub mdts: u8,
    /// CAP.MQES: an I/O queue has at most `mqes + 1` entries. At least 1.
    pub mqes: u16,
    /// Number of I/O queue pairs, 1 to 255.
    pub queues: u16,
    /// CAP.TO, in units of 500 ms: how long the driver waits for a change of CSTS.RDY.
    pub timeout_500ms: u8,
    /// CAP.DSTRD, 0 to 8: doorbells are `4 << stride_shift` bytes apart.
    pub stride_shift: u8,
    /// Number of interrupt vectors, 0 to 2048; each is an eventfd.
    pub vectors: u16,
    /// RTD3E: how long a shutdown may take, in microseconds; 0 means not reported.
    pub rtd3_entry_us: u32,
    /// CRDT1 to CRDT3, in units of 100 ms: the delays that a status may ask for by CRD; 0 means
    /// none. A host that has not declared to wait for them (ACRE of "host behavior support") sees
    /// CRD 0.
    pub retry_delays: [u16; 3],
    /// For how long after each start I/O commands fail with
    /// [`NAMESPACE_NOT_READY`](pinfold_nvme::spec::Status::NAMESPACE_NOT_READY), with CRD 1 where
    /// CRDT1 is set. Default: 0.
    pub not_ready: Duration,
    /// VS: 2.0 is 20000h. Before 1.3 there are no identification descriptors, before 1.1 no list of
    /// active namespaces.
    pub version: u32,
    /// ACL, 0-based: the number of aborts that may be outstanding.
    pub acl: u8,
    /// AERL, 0-based: the number of asynchronous event requests that may be outstanding.
    pub aerl: u8,
    /// SGLS: whether I/O commands may use SGLs.
    pub sgls: SglSupport,
}

impl ModelConfig {
    /// Creates the default configuration: transfers up to 1 MiB, 16 queue pairs of up to 1024
    /// entries, 10 s to become ready, no interrupts, no SGLs.
    pub fn new(namespaces: Vec<Namespace>) -> Self {
        Self {
            namespaces,
            mdts: 8,
            mqes: 1023,
            queues: 16,
            timeout_500ms: 20,
            stride_shift: 0,
            vectors: 0,
            rtd3_entry_us: 0,
            retry_delays: [0; 3],
            not_ready: Duration::ZERO,
            version: 2 << 16,
            acl: 3,
            aerl: 0,
            sgls: SglSupport::Unsupported,
        }
    }
}
