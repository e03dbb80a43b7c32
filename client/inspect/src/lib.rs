//! The subcommands of `permafrost` that look at a machine, at a cluster and at what is stored, and change nothing.

#![forbid(unsafe_code)]

mod contents;
mod doctor;
mod report;
mod top;

pub use contents::{
    ContentsChange, DIFF_EXAMPLES, DiffArguments, FileChange, MappingChange, PagesChange,
    ProcessChange, SharedChange, diff, maps,
};
pub use doctor::{
    DOCTOR_EXAMPLES, DoctorArguments, DoctorCheck, DoctorReport, DoctorStatus, doctor,
};
pub use report::{BugReport, REPORT_EXAMPLES, ReportArguments, report};
pub use top::{
    DumpLine, NodeLine, NodeQueue, QueueLine, TOP_EXAMPLES, TopArguments, TopView, TransferLine,
    top,
};
