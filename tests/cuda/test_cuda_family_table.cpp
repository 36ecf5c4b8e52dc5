#include <gtest/gtest.h>

#include "cuda/family.h"

// The table of a build with the family of families/empty, which needs no GPU.
namespace flash_dmattn::cuda {
namespace {

TEST(FamilyTable, ExtraFamilyComesFirst) {
  const auto table = families();
  ASSERT_GE(table.size(), 2u);
  EXPECT_EQ(table[0]->name, "empty");
  EXPECT_EQ(table[0]->decline_device({}), "it has no kernels");
}

TEST(FamilyTable, LibraryFamiliesFollowExtraFamily) {
  const auto table = families();
  EXPECT_EQ(table[table.size() - 2]->name, "sm90");
  EXPECT_EQ(table[table.size() - 1]->name, "sm80");
}

}  // namespace
}  // namespace flash_dmattn::cuda
