#include "family_table.h"

namespace flash_dmattn::cuda {

const Family empty_family = {
    .name = "empty",
    .decline_device = [](const DeviceProperties&) { return std::string("it has no kernels"); },
};

}  // namespace flash_dmattn::cuda
