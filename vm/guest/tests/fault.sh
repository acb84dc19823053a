# shellcheck shell=sh disable=SC2154,SC2086 # set by the suite; addresses hold nothing to be split
# A driver that submits revoked memory: crates/nvme/examples/iommu_fault.rs.

vfio_revoked_memory_is_unreachable() {
    before=$(faults)
    for target in $namespaces; do
        bind_to_vfio "${target%/*}"
        /test/iommu_fault "${target%/*}" "${target#*/}" >/tmp/fault 2>&1 || { cat /tmp/fault; fail "$target"; }
        cat /tmp/fault
    done
    # The kernel does not log each of them.
    [ "$(faults)" -gt "$before" ] || fail "the IOMMU saw no fault"
    note "$(grep 'PRP list' /tmp/fault)"
}
