//! Access to real devices: IOMMU, VFIO, iommufd.

use crate::backend::context::IommuInterface;
use crate::probe::devices::{Access, Bound, Node};
use crate::probe::facts::Facts;
use crate::probe::findings::{Finding, State, finding};

pub(super) fn findings(facts: &Facts) -> Vec<Finding> {
    let mut all = vec![iommu(facts), vfio(facts), iommufd(facts)];
    all.extend(facts.vfio.bound.iter().map(|bound| bound_device(bound, facts)));
    all
}

fn iommu(facts: &Facts) -> Finding {
    let what = "IOMMU groups";
    let devices: usize = facts.groups.iter().map(|group| group.devices.len()).sum();
    let units = if facts.iommus.is_empty() {
        String::new()
    } else {
        format!(", {}", facts.iommus.join(" "))
    };
    if !facts.groups.is_empty() {
        let detail = format!("{} groups with {devices} devices{units}", facts.groups.len());
        return finding(what, State::Good, detail);
    }
    if let Some(why) = facts.why_unreadable("kernel/iommu_groups") {
        return finding(what, State::Limited, format!("unknown: {why}"));
    }
    let words: Vec<&str> =
        facts.command_line.as_deref().unwrap_or_default().split_whitespace().collect();
    let off =
        words.iter().find(|word| ["iommu=off", "intel_iommu=off", "amd_iommu=off"].contains(word));
    match facts.firmware_iommu.as_deref() {
        Some(table) if let Some(word) = off => {
            let detail = format!(
                "the firmware describes an IOMMU ({table}), and the kernel's command line has {word}"
            );
            finding(what, State::Missing, detail)
        }
        Some("DMAR") if words.contains(&"intel_iommu=on") => {
            let detail = "the firmware describes an Intel IOMMU, and the kernel does not use it although its command line has \
                          intel_iommu=on: look for DMAR in dmesg";
            finding(what, State::Missing, detail)
        }
        Some("DMAR") => {
            let detail = "the firmware describes an Intel IOMMU, and the kernel does not use it";
            match facts.live.grub {
                true => finding(what, State::Missing, format!("{detail}; then reboot"))
                    .fixed_by(on_the_command_line("intel_iommu=on")),
                false => {
                    let detail =
                        format!("{detail}: add intel_iommu=on to its command line, then reboot");
                    finding(what, State::Missing, detail)
                }
            }
        }
        Some(table) => {
            let detail = format!(
                "the firmware describes an IOMMU ({table}), and the kernel does not use it: look for iommu=off on \
                 its command line"
            );
            finding(what, State::Missing, detail)
        }
        None => finding(
            what,
            State::Missing,
            "none: switch on VT-d or AMD-Vi in the firmware, or give the virtual machine an IOMMU",
        ),
    }
}

fn on_the_command_line(word: &str) -> String {
    format!(
        "sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&{word} /' /etc/default/grub && sudo update-grub"
    )
}

fn vfio(facts: &Facts) -> Finding {
    let what = "VFIO";
    let vfio = &facts.vfio;
    let unprotected =
        if vfio.noiommu { "; it allows use without an IOMMU, unprotected" } else { "" };
    match vfio.container.access {
        // A kernel without VFIO's groups has no container either: devices are opened for iommufd.
        Access::Absent if vfio.devices.is_empty() => {
            return absent(what, &vfio.container, &vfio.load);
        }
        Access::Denied => return denied(what, &vfio.container),
        Access::Allowed | Access::Absent => {}
    }
    if let Some(why) = facts.why_unreadable("vfio") {
        // Only a mode denies a folder that exists.
        let folder = vfio.container.path.strip_suffix("/vfio").unwrap_or_default();
        let remedy = why.contains("denied").then(|| format!("sudo chmod o+rx {folder}"));
        let found = finding(
            what,
            State::Limited,
            format!("whether a device is bound to it is unknown: {why}{unprotected}"),
        );
        return Finding { remedy, ..found };
    }
    let (bound, kind) =
        if vfio.groups.is_empty() { (&vfio.devices, "devices") } else { (&vfio.groups, "groups") };
    if bound.is_empty() && !vfio.bound.is_empty() {
        let detail = format!(
            "{} devices are bound to it, and none of their nodes exists here: a container needs them (--device){unprotected}",
            vfio.bound.len()
        );
        return finding(what, State::Limited, detail);
    }
    let Some(first) = bound.first() else {
        if facts.groups.is_empty()
            && !vfio.noiommu
            && facts.why_unreadable("iommu_groups").is_none()
        {
            let detail = "no device is bound to it, and none can be without an IOMMU";
            return finding(what, State::Limited, detail);
        }
        let detail = format!("no device is bound to it (BDF: the device's address){unprotected}");
        // The driver of the module binds devices.
        let bind = match vfio.modules.iter().any(|name| name == "vfio_pci") {
            true => Ok("sudo pinfold bind $BDF".to_owned()),
            false => vfio.load.clone(),
        };
        return finding(what, State::Limited, detail).fixed_if(bind);
    };
    let allowed = bound.iter().filter(|node| node.access == Access::Allowed).count();
    let detail = format!("{allowed} of {} bound {kind} may be opened{unprotected}", bound.len());
    match allowed {
        0 => Finding { remedy: first.fix.clone(), ..finding(what, State::Limited, detail) },
        _ if vfio.noiommu => finding(what, State::Limited, detail),
        _ => finding(what, State::Good, detail),
    }
}

/// Reports through which interface a device is opened, why, and its limit.
fn bound_device(bound: &Bound, facts: &Facts) -> Finding {
    let limit = match (bound.interface, facts.vfio.entries) {
        (IommuInterface::Type1, Some(entries)) => format!("; at most {entries} mappings"),
        _ => String::new(),
    };
    if let Some(node) = &bound.missing {
        let detail = format!(
            "by {}, and there is no {} here: a container needs it (--device)",
            bound.reason,
            node.display()
        );
        return finding(bound.address.clone(), State::Missing, detail);
    }
    let state =
        if bound.interface == IommuInterface::NoIommu { State::Limited } else { State::Good };
    finding(bound.address.clone(), state, format!("by {}{limit}", bound.reason))
}

/// Returns a node that this user may not open.
fn denied(what: &str, node: &Node) -> Finding {
    let errno = node.errno.map_or(String::new(), |errno| format!(" ({errno})"));
    let by = match &node.fix {
        Some(_) => "",
        None => ": not by its mode; look at the control group of devices, or a security module",
    };
    let detail = format!("{} may not be opened by this user{errno}{by}", node.path);
    Finding { remedy: node.fix.clone(), ..finding(what, State::Limited, detail) }
}

/// Returns a node that does not exist.
fn absent(what: &str, node: &Node, load: &Result<String, String>) -> Finding {
    let path = &node.path;
    let detail = match node.errno {
        Some(errno) if errno.raw() != libc::ENOENT => format!("{path}: {errno}"),
        _ => format!("no {path}"),
    };
    finding(what, State::Missing, detail).fixed_if(load.clone())
}

fn iommufd(facts: &Facts) -> Finding {
    let what = "iommufd";
    let node = &facts.iommufd;
    match node.access {
        Access::Allowed => finding(what, State::Good, node.path.clone()),
        Access::Denied => denied(what, node),
        Access::Absent if facts.kernel_at_least(6, 2) == Some(false) => {
            finding(what, State::Missing, format!("no {}: Linux has it since 6.2", node.path))
        }
        Access::Absent => absent(what, node, &facts.vfio.load_iommufd),
    }
}
