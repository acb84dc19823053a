//! Every end of `receive`, good or bad: what was received is in the file and in the report.

use crate::common::{
    Ended, Folder, Running, finish, pinfold, skipped, start, wait_for_words, wait_until,
};
use crate::receive::{
    attached, attached_receiving, dropped, interrupt, receiving, wait_until_detached,
};
use crate::receive_to::{check_slots, datagram};
use crate::wire::{Wire, arrived, number_of_bytes, run};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Returns the numbers of the datagrams in a file; every record is whole.
fn captured(file: &str) -> Vec<u64> {
    let mut reader = pcap_file::pcap::PcapReader::new(File::open(file).unwrap()).unwrap();
    let mut numbers = Vec::new();
    while let Some(packet) = reader.next_packet() {
        numbers.push(number_of_bytes(&packet.unwrap().data).unwrap());
    }
    numbers
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Sends `sent` packets to a program that is stopped: they stay in its ring.
fn fill_ring(wire: &Wire, child: &Child, sent: u64) {
    signal(child, Signal::STOP);
    let status = format!("/proc/{}/status", child.id());
    wait_until("it stops", || std::fs::read_to_string(&status).unwrap().contains("State:\tT"));
    let before = arrived();
    let sender = wire.sender();
    (0..sent).for_each(|number| assert!(sender.send(&datagram(number)).is_ok()));
    wait_until("they arrive", || arrived() >= before + sent);
}

/// Checks the report of a run that failed, and returns it.
fn failed(ended: Ended, words: &str) -> serde_json::Value {
    assert_eq!(ended.code, Some(1), "{ended:#?}");
    assert!(ended.err.contains(words), "{ended:#?}");
    let report = ended.report();
    assert!(report["failure"].as_str().unwrap().contains(words), "{report}");
    report
}

#[test]
fn a_removed_interface_loses_no_packet_that_arrived() {
    const SENT: u64 = 500;
    for kept in ["--pcap", "--to", "--reflect"] {
        let Some(wire) = Wire::new(1, 1500) else { return };
        let folder = Folder::new();
        let file = folder.arg("packets");
        let child = match kept {
            "--reflect" => receiving(&[kept, "--json"]),
            _ => receiving(&[kept, &file, "--json"]),
        };
        let driver = wire.driver_drops();
        fill_ring(&wire, &child, SENT);
        let driver = wire.driver_drops() - driver;
        run("ip link del v1");
        signal(&child, Signal::CONT);
        let report = failed(finish(child), "the interface is down or was removed");
        let count = |key: &str| report[key].as_u64().unwrap();
        assert_eq!(count("packets") + dropped(&report), SENT - driver, "{report}");
        assert!(count("packets") > SENT / 2, "{report}");
        match kept {
            "--pcap" => {
                assert_eq!(count("captured") + count("not_captured"), count("packets"), "{report}");
                let numbers = captured(&file);
                assert_eq!(numbers.len() as u64, count("captured"), "{report}");
                assert!(numbers.is_sorted() && !numbers.is_empty());
            }
            "--to" => {
                assert_eq!(
                    (count("stored"), count("not_stored")),
                    (count("packets"), 0),
                    "{report}"
                );
                assert_eq!(
                    check_slots(&std::fs::read(&file).unwrap()) as u64,
                    count("stored"),
                    "{report}"
                );
            }
            _ => assert_eq!(
                count("reflected") + count("not_reflected"),
                count("packets"),
                "{report}"
            ),
        }
    }
}

/// Runs the program with a file system of 64 KiB at `full`, and keeps what it has written there as
/// `kept`.
fn on_a_full_disk(folder: &Folder, args: &str) -> Running {
    // The program ends with the shell, which a test that fails kills.
    let script = format!(
        "mount -t tmpfs -o size=64k tmpfs '{0}' && {{ setpriv --pdeathsig KILL '{1}' receive v1 --json {args} '{0}/packets'; code=$?; \
         cp '{0}/packets' '{2}'; exit $code; }}",
        folder.arg("full"),
        env!("CARGO_BIN_EXE_pinfold"),
        folder.arg("kept"),
    );
    std::fs::create_dir(folder.path("full")).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    attached(command.spawn().unwrap().into())
}

#[test]
fn a_full_disk_ends_with_a_whole_packet_and_the_report() {
    for kept in ["--pcap", "--to"] {
        let Some(wire) = Wire::new(1, 1500) else { return };
        let folder = Folder::new();
        let mut child = on_a_full_disk(&folder, kept);
        let sender = wire.sender();
        let mut number = 0;
        wait_until("it ends", || {
            // Until the program has attached its own they go to the kernel.
            (0..20).for_each(|_| assert!(sender.send(&datagram(number)).is_ok()));
            number += 1;
            child.try_wait().unwrap().is_some()
        });
        let report = failed(finish(child), "No space left");
        let count = |key: &str| report[key].as_u64().unwrap();
        if kept == "--pcap" {
            assert_eq!(captured(&folder.arg("kept")).len() as u64, count("captured"), "{report}");
            assert_eq!(count("captured") + count("not_captured"), count("packets"), "{report}");
            assert!(count("captured") > 20, "{report}");
        } else {
            assert_eq!(count("stored") + count("not_stored"), count("packets"), "{report}");
            assert!(count("stored") > 0 && count("not_stored") > 0, "{report}");
        }
        wait_until_detached();
    }
}

#[test]
fn a_fifo_without_a_reader_ends_at_the_first_signal() {
    let Some(_wire) = Wire::new(1, 1500) else { return };
    let folder = Folder::new();
    let fifo = folder.arg("fifo");
    run(&format!("mkfifo {fifo}"));
    let mut child = start(&["receive", "v1", "--pcap", &fifo]);
    // It attaches to the interface before it opens the file: a signal in between finds no wait.
    wait_for_words(&mut child, "waiting for its reader");
    interrupt(&child);
    let ended = finish(child);
    // After ten seconds it would end without cleaning up.
    assert_eq!(ended.code, Some(130), "{ended:#?}");
    assert!(!ended.err.contains("without cleaning"), "{ended:#?}");
    wait_until_detached();
}

#[test]
fn a_fifo_is_read_while_the_program_runs() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let folder = Folder::new();
    let fifo = folder.arg("fifo");
    run(&format!("mkfifo {fifo}"));
    let child = attached(start(&["receive", "v1", "--pcap", &fifo, "--count", "30", "--json"]));
    let reader = fifo.clone();
    let reader = std::thread::spawn(move || captured(&reader));
    let child = attached_receiving(child);
    let sender = wire.sender();
    (0..30).for_each(|number| assert!(sender.send(&datagram(number)).is_ok()));
    let report = finish(child).json();
    assert_eq!(report["captured"], 30, "{report}");
    assert_eq!(reader.join().unwrap(), (0..30).collect::<Vec<_>>());
}

#[test]
fn a_reader_that_does_not_read_ends_at_the_first_signal() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let folder = Folder::new();
    let fifo = folder.arg("fifo");
    run(&format!("mkfifo {fifo}"));
    let flags = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap();
    let _reader = OpenOptions::new().read(true).custom_flags(flags).open(&fifo).unwrap();
    let child = receiving(&["--pcap", &fifo, "--json"]);
    let sender = wire.sender();
    let before = arrived();
    // More than the pipe holds.
    (0..400).for_each(|number| assert!(sender.send(&datagram(number)).is_ok()));
    wait_until("they arrive", || arrived() >= before + 400);
    interrupt(&child);
    let report = failed(finish(child), "its reader does not read");
    let count = |key: &str| report[key].as_u64().unwrap();
    assert_eq!(count("captured") + count("not_captured"), count("packets"), "{report}");
    wait_until_detached();
}

#[test]
fn the_standard_output_by_any_name_is_not_a_file_to_capture_to() {
    let folder = Folder::new();
    for name in ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"] {
        pinfold(&["receive", "lo", "--pcap", name, "--force"]).failed(2, &["standard output"]);
    }
    let file = folder.file("out", b"");
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
    command.args(["receive", "lo", "--force", "--pcap", &file]);
    command.stdin(Stdio::null()).stdout(File::create(&file).unwrap()).stderr(Stdio::piped());
    crate::common::finish_with(command).failed(2, &["standard output"]);
}

#[test]
fn queues_that_are_added_are_reported() {
    let Some(_wire) = Wire::new(4, 1500) else { return };
    let set = |queues: u32| {
        let to = queues.to_string();
        Command::new("ethtool").args(["-L", "v1", "rx", &to, "tx", &to]).output()
    };
    // The sender's queues are not more than those that receive.
    run("ip link del v0");
    run("ip link add v0 type veth peer name v1 numrxqueues 4 numtxqueues 4");
    match set(1) {
        Ok(output) if output.status.success() => {}
        Ok(output) => return skipped(&String::from_utf8_lossy(&output.stderr)),
        Err(_) => return skipped("ethtool is not installed"),
    }
    run("ip link set dev v0 up");
    run("ip link set dev v1 up");
    let mut child = receiving(&["--json"]);
    assert!(set(3).unwrap().status.success());
    // The words come before the end of the run, which reports the same.
    let err = std::io::BufReader::new(child.stderr.take().unwrap());
    let (sender, lines) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        std::io::BufRead::lines(err).try_for_each(|line| sender.send(line.unwrap()))
    });
    let line = lines.recv_timeout(Duration::from_secs(60)).unwrap();
    assert!(line.contains("v1 has 3 queues now and 1 are received"), "{line}");
    interrupt(&child);
    let ended = finish(child);
    let report = ended.report();
    assert_eq!(
        (&report["queues"], &report["queues_added"]),
        (&serde_json::json!([0]), &2.into()),
        "{report}"
    );
}
