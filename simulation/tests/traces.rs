//! Traces: what is replayed of them, and what bad ones are refused with.

use std::path::PathBuf;

use permafrost_simulation::workload::{Fb2009, TraceError, fb2009, openb};

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, text: &[u8]) -> Self {
        let directory =
            std::env::temp_dir().join(format!("permafrost-traces-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::write(directory.join("trace"), text).unwrap();
        Self(directory)
    }

    fn trace(&self) -> PathBuf {
        self.0.join("trace")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_job_has_a_map_for_128_mib_and_a_reduce_for_a_gib() {
    let text = b"job0\t49\t49\t0\t0\t5\njob1\t101\t52\t134217728\t1\t0\n\njob2\t101\t0\t134217729\t2147483649\t7\n";
    let scratch = Scratch::new("counts", text);
    let workload = fb2009(&scratch.trace(), &Fb2009::default()).unwrap();
    let counts: Vec<Vec<usize>> = workload
        .jobs
        .iter()
        .map(|job| job.stages.iter().map(Vec::len).collect())
        .collect();
    assert_eq!(counts, [[1, 0], [1, 1], [2, 3]]);
    assert_eq!(workload.jobs[1].submitted.micros(), 101_000_000);
    assert!(workload.remarks[0].contains("1 jobs without map input"));
    assert!(!workload.synthetic);
}

/// Returns the message for a trace whose second line is `line`.
fn refused(name: &str, line: &[u8]) -> String {
    let text = [b"job0\t49\t49\t1\t1\t1\n", line, b"\n"].concat();
    let scratch = Scratch::new(name, &text);
    let error = fb2009(&scratch.trace(), &Fb2009::default()).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("line 2"), "{message}");
    message
}

#[test]
fn bad_lines_are_refused_with_their_number_and_what_to_do() {
    assert!(refused("torn", b"job1\t101\t52\t7363").contains("torn: fetch the trace again"));
    assert!(refused("early", b"job1\t48\t1\t1\t1\t1").contains("sort the file"));
    assert!(refused("negative", b"job1\t101\t52\t-5\t1\t1").contains("negative"));
    assert!(refused("nan", b"job1\tNaN\t52\t5\t1\t1").contains("no number"));
    assert!(refused("infinite", b"job1\tinf\t52\t5\t1\t1").contains("too large"));
    assert!(refused("text", b"job1\tsoon\t52\t5\t1\t1").contains("a text"));
    assert!(refused("joined", b"job1\t101\t52\t5\t1\t1\tjob2").contains("joined"));
    assert!(refused("petabytes", b"job1\t101\t52\t900000000000000000\t1\t1").contains("too large"));
    // 7.5 million maps and a million reduces.
    let petabytes = b"job1\t101\t52\t999999999999999\t999999999999999\t1";
    assert!(refused("maps", petabytes).contains("correct the sizes"));
    assert!(refused("binary", b"\x1f\x8b\xff\xfe").contains("compressed"));
    assert!(refused("endless", &[b'x'; 10_000]).contains("longer than"));
}

#[test]
fn files_that_are_no_traces_are_named() {
    let empty = Scratch::new("empty", b"\n\n");
    let error = fb2009(&empty.trace(), &Fb2009::default()).unwrap_err();
    assert!(matches!(error, TraceError::Empty { .. }), "{error}");
    let error = fb2009(&empty.0.join("none"), &Fb2009::default()).unwrap_err();
    assert!(error.to_string().contains("none"), "{error}");
}

const PODS: &str = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n";

#[test]
fn pods_that_were_never_scheduled_are_left_out_and_counted() {
    let text = format!(
        "{PODS}a,12000,16384,1,1000,,LS,Running,0,500,10\nb,100,64,0,0,,BE,Pending,5,800,\nc,2000,64,0,0,,BE,Failed,3,90,4\n"
    );
    let scratch = Scratch::new("pods", text.as_bytes());
    let nodes = "sn,cpu_milli,memory_mib,gpu,model\nn0,32000,262144,0,\n";
    std::fs::write(scratch.0.join("openb_node_list_all_node.csv"), nodes).unwrap();
    let workload = openb(&scratch.trace(), None).unwrap();
    assert_eq!(workload.nodes.len(), 1);
    assert_eq!(workload.jobs.len(), 2);
    assert_eq!(
        (workload.jobs[0].priority, workload.jobs[1].priority),
        (9, 0)
    );
    assert_eq!(workload.jobs[0].stages[0][0].work.value(), 490.0);
    assert!(workload.remarks[0].starts_with("1 pods"));
    let text = format!("{PODS}a,12000,16384,1,1000,,LS,Running,20,500,10\n");
    std::fs::write(scratch.trace(), text).unwrap();
    let error = openb(&scratch.trace(), None).unwrap_err().to_string();
    assert!(
        error.contains("line 2") && error.contains("created at 20"),
        "{error}"
    );
    std::fs::write(scratch.trace(), format!("{PODS}a,1,2,3\n")).unwrap();
    let error = openb(&scratch.trace(), None).unwrap_err().to_string();
    assert!(error.contains("4 columns and not 11"), "{error}");
}
