/* Domains of PCI devices: every misuse. No device is needed, and none is opened. */
#include "check.h"

static void refusals(void) {
    pf_domain_t *domain = NULL, *soft;
    REFUSED(EFAULT, "`out` is NULL", pf_domain_vfio(NULL, "0000:01:00.0", PF_IOMMU_BEST));
    REFUSED(EFAULT, "`bdf` is NULL", pf_domain_vfio(&domain, NULL, PF_IOMMU_BEST));
    REFUSED(EINVAL, "flags 0x7", pf_domain_vfio(&domain, "0000:01:00.0", 7));
    REFUSED(EINVAL, "nonsense", pf_domain_vfio(&domain, "nonsense", PF_IOMMU_BEST));
    REFUSED(EINVAL, "not UTF-8", pf_domain_vfio(&domain, "\xff", PF_IOMMU_TYPE1));
    /* A domain number that no machine has. */
    REFUSED(ENODEV, "fffe:1f:1f.7", pf_domain_vfio(&domain, "fffe:1f:1f.7", PF_IOMMU_IOMMUFD));
    CHECK(domain == NULL);
    OK(pf_domain_soft(&soft));
    REFUSED(ENOTSUP, "pf_domain_vfio", pf_domain_attach(soft, "0000:01:00.0"));
    REFUSED(EFAULT, "`bdf` is NULL", pf_domain_attach(soft, NULL));
    REFUSED(ENODEV, "0000:01:00.0", pf_domain_detach(soft, "0000:01:00.0"));
    REFUSED(EFAULT, "`bdf` is NULL", pf_domain_detach(soft, NULL));
    OK(pf_domain_put(soft));
    REFUSED(EBADF, "destroyed", pf_domain_attach(soft, "0000:01:00.0"));
    REFUSED(EBADF, "destroyed", pf_domain_detach(soft, "0000:01:00.0"));
    REFUSED(EBADF, "destroyed", pf_domain_put(soft));
}

int main(void) {
    refusals();
    puts("device: ok");
    return 0;
}
