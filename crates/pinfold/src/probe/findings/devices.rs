//! Access to real devices: IOMMU, VFIO, iommufd.

use crate::backend::interface::IommuInterface;
use crate::probe::devices::{Access, Bound, Node};
use crate::probe::facts::Facts;
use crate::probe::finding::{Finding, State, finding};

pub(super) fn findings(facts: &Facts) -> Vec<Finding> {
    let mut all = vec![iommu(facts), vfio(facts), iommufd(facts)];
    all.extend(facts.vfio.bound.iter().map(|bound| bound_device(bound, facts)));
    all
}

fn iommu(facts: &Facts) -> Finding {
    let what = "IOMMU groups";
    let devices: usize = facts.groups.iter().map(|group| group.devices.len()).sum();
    let units = if facts.iommus.is_empty() { String::new() } else { format!(", {}", facts.iommus.join(" ")) };
    if !facts.groups.is_empty() {
        let detail = format!("{} groups with {devices} devices{units}", facts.groups.len());
        return finding(what, State::Good, detail);
    }
    match facts.firmware_iommu.as_deref() {
        Some("DMAR") => {
            let detail = "the firmware describes an Intel IOMMU, and the kernel does not use it; then reboot";
            finding(what, State::Missing, detail).fixed_by(on_the_command_line("intel_iommu=on"))
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
    format!("sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&{word} /' /etc/default/grub && sudo update-grub")
}

fn vfio(facts: &Facts) -> Finding {
    let what = "VFIO";
    let vfio = &facts.vfio;
    let unprotected = if vfio.noiommu { "; it allows use without an IOMMU, unprotected" } else { "" };
    match vfio.container.access {
        // A kernel without VFIO's groups has no container either: devices are opened for iommufd.
        Access::Absent if vfio.devices.is_empty() => {
            let detail = format!("no {}", vfio.container.path);
            return finding(what, State::Missing, detail).fixed_by("sudo modprobe vfio-pci");
        }
        Access::Denied => {
            let detail = format!("{} may not be opened by this user", vfio.container.path);
            return finding(what, State::Limited, detail).fixed_by(own(&vfio.container));
        }
        Access::Allowed | Access::Absent => {}
    }
    let (bound, kind) =
        if vfio.groups.is_empty() { (&vfio.devices, "devices") } else { (&vfio.groups, "groups") };
    let Some(first) = bound.first() else {
        let detail = format!("no device is bound to it (BDF: the device's address){unprotected}");
        let bind = "sudo pinfold bind $BDF";
        return finding(what, State::Limited, detail).fixed_by(bind);
    };
    let allowed = bound.iter().filter(|node| node.access == Access::Allowed).count();
    let detail = format!("{allowed} of {} bound {kind} may be opened{unprotected}", bound.len());
    match allowed {
        0 => finding(what, State::Limited, detail).fixed_by(own(first)),
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
    let state = if bound.interface == IommuInterface::NoIommu { State::Limited } else { State::Good };
    finding(bound.address.clone(), state, format!("by {}{limit}", bound.reason))
}

fn own(node: &Node) -> String {
    format!("sudo chown $USER {}", node.path)
}

fn iommufd(facts: &Facts) -> Finding {
    let what = "iommufd";
    let node = &facts.iommufd;
    match node.access {
        Access::Allowed => finding(what, State::Good, node.path.clone()),
        Access::Denied => {
            let detail = format!("{} may not be opened by this user", node.path);
            finding(what, State::Limited, detail).fixed_by(own(node))
        }
        Access::Absent if facts.kernel_at_least(6, 2) == Some(false) => {
            finding(what, State::Missing, format!("no {}: Linux has it since 6.2", node.path))
        }
        Access::Absent => {
            finding(what, State::Missing, format!("no {}", node.path)).fixed_by("sudo modprobe iommufd")
        }
    }
}
