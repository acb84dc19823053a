# shellcheck shell=sh disable=SC2154,SC2086 # set by the suite; addresses hold nothing to be split
# A driver that names memory which was taken back: crates/nvme/examples/iommu_fault.rs.

vfio_memory_taken_back_is_out_of_reach() {
    before=$(faults)
    for target in $namespaces; do
        taken "${target%/*}"
        /test/iommu_fault "${target%/*}" "${target#*/}" >/tmp/fault 2>&1 || { cat /tmp/fault; fail "$target"; }
        cat /tmp/fault
    done
    # The kernel does not print each of them.
    [ "$(faults)" -gt "$before" ] || fail "the IOMMU saw no fault"
    note "$(grep 'PRP list' /tmp/fault)"
}
